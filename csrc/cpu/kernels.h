// The table of an instruction set's functions, filled by kernels.cpp, which is compiled once per set.
#pragma once
#include <stdint.h>

namespace moert {

struct Form {
    int act;   // an index of ACTS in moe_runtime/native/library.py
    int form;  // 0 no gate, 1 gate first, 2 interleaved
    float limit, up_offset;
};

struct Forward {
    Form form;
    const void* z;
    int64_t I;
    void* h;
};

struct Backward {
    Form form;
    const void *z, *dh;
    const float* weight;
    const int32_t* row_slot;
    int64_t I;
    void *dz, *wh;
    float* dweight;
};

struct Combine {
    const void* y;
    const float* weight;
    const int32_t* slot_row;
    int64_t K, H, rows;
    void* out;
};

// Rows of one expert; its rows of h start at `at`.
struct Piece {
    int32_t expert, begin, end, at;
};

// the first of the ascending values begin..end that is at least `least`; `end` if none is
static inline int64_t first_from(const int32_t* values, int64_t begin, int64_t end, int64_t least) {
    while (begin < end) {
        const int64_t middle = (begin + end) / 2;
        if (values[middle] < least) begin = middle + 1;
        else end = middle;
    }
    return begin;
}

// How the work is divided with matrix tiles: a block of weights is multiplied with rows that stay in the L2 cache.
struct Tiled {
    static constexpr int64_t FROM = 4;  // least rows of an expert
    static constexpr int64_t BLOCK = 32, COLUMNS = 128;  // rows of a block; columns of out of a unit
    static constexpr int64_t BYTES = 1 << 20;  // of x, and of the sums of out
    static int64_t rows(int64_t length) {
        const int64_t fit = BYTES / (2 * (length + 1)) / BLOCK * BLOCK;
        return fit < 128 ? 128 : fit > 256 ? 256 : fit;
    }
};

// Units of `up` are (piece, block of up_columns of h); of `down` (part of the tokens, block of down_columns of out).
struct Experts {
    static constexpr int64_t COLUMNS = 32, ROWS = 48, PANEL = 64, PANELS = 4;  // of h in a panel with gate and up; panels at most
    static constexpr int64_t REACH = 512;  // elements of the rows of weights that are packed at once
    static constexpr int64_t PIECE = 1024;  // rows; enough that packing the weights again for each piece costs little
    // floats of `panels` panels and of the sums of their products
    static constexpr int64_t product(int64_t panels, int64_t rows = PIECE) { return panels * (REACH + rows) * PANEL; }
    Form form;
    const void *x, *up, *down, *up_bias, *down_bias;
    int64_t up_stride_e, up_stride, down_stride_e, down_stride;
    const int32_t* trained_row;  // of an expert whose weights are stored apart from the stacks, else -1; or null
    const void *up_trained, *down_trained;
    const float* weight;
    const int32_t* row_slot;
    const Piece* pieces;
    int64_t n_pieces, T, H, I, K, first_row, token_parts;
    int64_t up_columns, down_columns, h_stride;
    int64_t sums_at;  // floats in a thread's panel before the sums of `down`
    void *h, *z, *out;  // z may be null; h and out may
    bool apart(int64_t e) const { return trained_row && trained_row[e] >= 0; }
    // the first weights of expert e
    template <class T>
    const T* up_of(int64_t e) const {
        return apart(e) ? (const T*)up_trained + trained_row[e] * up_stride_e : (const T*)up + e * up_stride_e;
    }
    template <class T>
    const T* down_of(int64_t e) const {
        return apart(e) ? (const T*)down_trained + trained_row[e] * down_stride_e : (const T*)down + e * down_stride_e;
    }
};

// How the backward pass is divided with matrix tiles: the elements of a sum that are packed at once, and the panels of columns of dh
// and dx that are multiplied by them. Sums longer than that keep partial sums of all rows, so they have fewer panels.
struct TiledBackward {
    static constexpr int64_t LONG = 1024, PART = 512, PANELS = 8, PANELS_OF_LONGER = 4;
    static int64_t panels(int64_t length) { return length > LONG ? PANELS_OF_LONGER : PANELS; }
};

// The backward pass of a group of experts whose z is saved. Units of `dh` are (piece, dh_panels of h); of `dx` (piece, dx_panels of x); of `dw`
// (expert, block of HIGH x WIDE values of a gradient), first all of d up.
struct ExpertsBackward {
    static constexpr int64_t DEPTH = 256, HIGH = 512, WIDE = 512, STRIP = 128;
    static constexpr int64_t WEIGHTS = DEPTH * (STRIP + WIDE) + HIGH * WIDE;  // floats per thread for the weights' gradients
    Experts forward;
    const void* dout;
    const Piece* experts;  // those whose weights have gradients; `expert` is the row of the gradient
    int64_t rows, dh_panels, dx_panels, up_units, down_units;
    void *dz, *wh;  // of these rows
    float* dots;    // [panels of h][rows]
    bool up_adds, down_adds, past;  // whether gradients are accumulated; whether they bypass the caches
    void *dx_rows, *dup, *ddown;    // may be null
    int64_t dup_stride_e, dup_stride, ddown_stride_e, ddown_stride;
};

// LoRA experts over one MLP. Rows are pairs of a token and an expert that it selected, by expert, then by token; a piece has the rows of
// one expert. Units are blocks of `tokens` tokens.
struct Lora {
    static constexpr int64_t PART = 256, ROWS = 24;  // columns of h and rows of an expert at once
    int act;
    float scaling;
    const void *z, *low;                    // of the MLP [T, 2I]; x A^T of gate and of up [2][T, E r]
    const void *gate_b, *up_b, *down_a;     // [E, r, I], or null
    const int32_t* row_token;               // [rows]
    const float* weight;                    // [rows]
    const Piece* pieces;
    int64_t n_pieces, T, I, E, r, tokens;
    void *h, *q;  // [T, I]; [T, E r]
    // floats of a thread: panels of the halves, sums of the tokens, ranks of a piece's rows, and some rows of h
    static constexpr int64_t floats(int64_t tokens, int64_t I, int64_t r) { return 3 * r * PART + 2 * tokens * (I + r) + ROWS * PART; }
};

// The backward pass of the tokens first..last, whose rows the pieces have; their values of dgate, dup and weighted h start at `at`.
struct LoraBackward {
    static constexpr int64_t DEPTH = 128;            // rows of a sum at once
    static constexpr int64_t ELEMENTS = 1 << 23;     // of `kept`, at most, unless one block has more
    Lora forward;
    const void *dh, *dq;  // [T, I]; [T, E r], times the scaling, or null
    int64_t first, last;
    void *kept, *dz, *dlow;  // [rows][3][I]; [T, 2I]; [2][T, E r]
    float* dots;             // [rows] <da, h>
    float *dgate_b, *dup_b, *ddown_a;  // [E, r, I] to which is added, or null
    // of a thread that sums the gradients of the pairs
    static constexpr int64_t floats(int64_t r) { return DEPTH * (Lora::PART + (r + 63) / 64 * 64) + r * Lora::PART; }
};

// The sum of E experts of P values each, times their alpha, by blocks of values, and within a block by groups of GROUP experts.
struct Merge {
    static constexpr int64_t BLOCK = 4096, GROUP = 8;  // more streams than the hardware prefetches take twice the time
    const void* weight;
    const float* alpha;
    int64_t stride_e, E, P;
    void* out;
};

// parts [blocks][E] = <dout, weight[e]> of each block.
struct MergeGradient {
    const void *dout, *weight;
    bool narrow;  // dout is bfloat16
    int64_t stride_e, E, P;
    float* parts;
};

// One expert [P, Q] of a packed stack; moe_runtime/ops/packed.py defines `scale` and the three fields after it.
struct Unpack {
    enum { NF4, MXFP4, FP8, INT8 };
    int format;
    const uint8_t* data;
    const void* scale;
    const float *nested, *map;
    float offset;
    int64_t expert, P, Q;
    void* out;
};

// Rounds of SUMS independent sums of `steps` products each, in registers only.
struct Peak {
    static constexpr int SUMS = 12;  // more than the products that a core has in flight
    int64_t steps;
    float scale, shift;  // chosen so that a sum stays finite
    float* sink;         // [rounds]
};

struct Kernels {
    // indexed by dtype / 2: float32, bfloat16
    void (*activate[2])(const Forward&, int64_t begin, int64_t end);
    void (*activate_backward[2])(const Backward&, int64_t begin, int64_t end);
    void (*combine[2])(const Combine&, int64_t begin, int64_t end);
    // one unit; `panel` belongs to the thread: PANEL columns of the longer of H and I, in whole vectors, and for `down` PANEL
    // columns of a part's tokens
    void (*experts_up[2])(const Experts&, int64_t unit, float* panel);
    void (*experts_down[2])(const Experts&, int64_t unit, float* panel);
    void (*experts_dh[2])(const ExpertsBackward&, int64_t unit, float* panel);
    void (*experts_dx[2])(const ExpertsBackward&, int64_t unit, float* panel);
    void (*experts_dw[2])(const ExpertsBackward&, int64_t unit, float* panel);
    void (*lora_forward[2])(const Lora&, int64_t unit, float* space);
    void (*lora_backward[2])(const LoraBackward&, int64_t unit, float* space);
    void (*lora_pairs[2])(const LoraBackward&, int64_t unit, float* space);  // (piece, pair, PART columns)
    // of blocks
    void (*merge[2])(const Merge&, int64_t begin, int64_t end);
    void (*merge_gradient[2])(const MergeGradient&, int64_t begin, int64_t end);
    void (*unpack[2])(const Unpack&, int64_t begin, int64_t end);  // of rows
    void (*peak[2])(const Peak&, int64_t begin, int64_t end);
    int64_t peak_flops[2];  // of one step of one sum
    bool tiled[2];
};

extern const Kernels generic;
#ifdef __x86_64__
extern const Kernels avx2, avx512, avx512_bf16, amx;
#endif

}  // namespace moert
