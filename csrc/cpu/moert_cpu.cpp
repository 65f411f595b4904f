// The C interface: sorting, the choice of the instruction set, and how rows are divided among OpenMP's threads.
// A row's result does not depend on the division, so the number of threads does not change any bit.
#include "moert_cpu.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels.h"

#if defined(MOERT_WITH_amx)
#include <cpuid.h>
#include <sys/syscall.h>
#endif

#ifndef MOERT_BUILD_INFO
#define MOERT_BUILD_INFO "{}"
#endif

namespace {

using moert::Experts;
using moert::Kernels;
using moert::Lora;
using moert::LoraBackward;
using moert::Piece;
using moert::Tiled;
using moert::TiledBackward;

struct Variant {
    const char* name;
    const Kernels* kernels;
    bool (*runs)();
};

// MOERT_WITH_<set>: the sets that moe_runtime/native/build.py's compiler supports; older ones may not know the names
#if defined(MOERT_WITH_avx2)
bool runs_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#endif
#if defined(MOERT_WITH_avx512)
bool runs_avx512() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif
#if defined(MOERT_WITH_avx512_bf16)
bool runs_avx512_bf16() { return runs_avx512() && __builtin_cpu_supports("avx512bf16"); }
#endif
#if defined(MOERT_WITH_amx)
// checks the processor's bits, and requests permission from the kernel to use tiles in this process
bool runs_amx() {
    unsigned a, b, c, d;
    const bool tiles = __get_cpuid_count(7, 0, &a, &b, &c, &d) && d >> 22 & 1 && d >> 24 & 1;
    return runs_avx512_bf16() && tiles && syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
}
#endif
bool runs_always() { return true; }

const Variant VARIANTS[] = {
#if defined(MOERT_WITH_amx)
    {"amx", &moert::amx, runs_amx},
#endif
#if defined(MOERT_WITH_avx512_bf16)
    {"avx512_bf16", &moert::avx512_bf16, runs_avx512_bf16},
#endif
#if defined(MOERT_WITH_avx512)
    {"avx512", &moert::avx512, runs_avx512},
#endif
#if defined(MOERT_WITH_avx2)
    {"avx2", &moert::avx2, runs_avx2},
#endif
    {"generic", &moert::generic, runs_always},
};

// ATEN_CPU_CAPABILITY limits torch's kernels and also these
bool allowed(const char* name) {
    const char* const limit = getenv("ATEN_CPU_CAPABILITY");
    if (limit && !strcmp(limit, "default")) return !strcmp(name, "generic");
    if (limit && !strcmp(limit, "avx2")) return !strcmp(name, "avx2") || !strcmp(name, "generic");
    return true;
}

const Variant* choose() {
    const Variant* v = VARIANTS;
    while (!allowed(v->name) || !v->runs()) v++;
    return v;
}

const Variant* variant = choose();

typedef void (*Parallel)(void (*)(void*), void*, unsigned, unsigned);
typedef int (*Number)();
Parallel omp_parallel = nullptr;
Number omp_thread = nullptr, omp_threads = nullptr;

// How many of a team of `threads` have enough work. The others return at once, so that the team keeps the size of torch's: for a
// smaller team libgomp would end the remaining threads, and create them again for the next larger one.
int64_t parts_of(int64_t n, double bytes, int threads) {
    const double worth = 1 << 15;  // bytes that one core moves while a thread wakes up
    const int64_t parts = bytes < worth * threads ? (int64_t)(bytes / worth) : threads;
    return omp_parallel ? (parts < n ? parts : n) : 1;
}

// Calls run(work, begin, end) for equal parts of 0..n.
template <class Work>
void parallel(void (*run)(const Work&, int64_t, int64_t), const Work& work, int64_t n, double bytes, int threads) {
    struct Split {
        void (*run)(const Work&, int64_t, int64_t);
        const Work& work;
        int64_t n, parts;
        static void share(void* data) {
            const Split& split = *(const Split*)data;
            const int64_t mine = omp_thread(), team = omp_threads();  // fewer than requested inside another region
            const int64_t threads = split.parts < team ? split.parts : team;
            if (mine < threads) split.run(split.work, split.n * mine / threads, split.n * (mine + 1) / threads);
        }
    } split = {run, work, n, parts_of(n, bytes, threads)};
    if (n <= 0) return;
    if (split.parts <= 1) return run(work, 0, n);
    omp_parallel(Split::share, &split, (unsigned)threads, 0);
}

// Calls run(work, unit, panel) for each unit of 0..n; units differ in duration, so each thread claims a new one when it is done.
template <class Work>
void in_turns(
    void (*run)(const Work&, int64_t, float*), const Work& work, int64_t n, double bytes, int threads, char* panels,
    int64_t panel_bytes) {
    struct Turns {
        void (*run)(const Work&, int64_t, float*);
        const Work& work;
        int64_t n, parts, next;
        char* panels;
        int64_t panel_bytes;
        static void share(void* data) {
            Turns& turns = *(Turns*)data;
            const int64_t mine = omp_parallel ? omp_thread() : 0;
            if (mine >= turns.parts) return;
            for (int64_t unit; (unit = __atomic_fetch_add(&turns.next, 1, __ATOMIC_RELAXED)) < turns.n;)
                turns.run(turns.work, unit, (float*)(turns.panels + mine * turns.panel_bytes));
        }
    } turns = {run, work, n, parts_of(n, bytes, threads), 0, panels, panel_bytes};
    if (turns.parts > 1) return omp_parallel(Turns::share, &turns, (unsigned)threads, 0);
    for (int64_t unit = 0; unit < n; unit++) run(work, unit, (float*)panels);
}

template <class T>
int64_t sort(const T* idx, int64_t slots, int64_t E, int32_t* offsets, int32_t* row_slot, int32_t* slot_row) {
    memset(offsets, 0, (E + 1) * sizeof *offsets);
    for (int64_t s = 0; s < slots; s++)
        if (idx[s] >= 0 && (uint64_t)idx[s] < (uint64_t)E) offsets[idx[s] + 1]++;
    int64_t most = 0;
    for (int64_t e = 0; e < E; e++) {
        if (most < offsets[e + 1]) most = offsets[e + 1];
        offsets[e + 1] += offsets[e];
    }
    int32_t dropped = offsets[E];
    // while the rows of e are assigned, offsets[e] advances to its end, where the next expert begins
    for (int64_t s = 0; s < slots; s++) {
        const bool kept = idx[s] >= 0 && (uint64_t)idx[s] < (uint64_t)E;
        const int32_t row = kept ? offsets[idx[s]]++ : dropped++;
        row_slot[row] = (int32_t)s;
        if (slot_row) slot_row[s] = row;
    }
    memmove(offsets + 1, offsets, E * sizeof *offsets);
    offsets[0] = 0;
    return most;
}

struct Gather {
    const char* x;
    const int32_t* row_token;
    int64_t bytes;
    char* out;
};

void gather(const Gather& g, int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; r++) memcpy(g.out + r * g.bytes, g.x + g.row_token[r] * g.bytes, g.bytes);
}

int64_t size_of(int dtype) { return dtype ? 2 : 4; }
int64_t blocks(int64_t n, int64_t size) { return (n + size - 1) / size; }
int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// writes the pieces of the experts first..last-1, of nearly equal sizes per expert; returns how many
int64_t cut(const int32_t* offsets, int64_t first, int64_t last, int64_t piece, int64_t block, Piece* pieces) {
    int64_t count = 0, at = 0;
    for (int64_t e = first; e < last; e++) {
        const int64_t begin = offsets[e], rows = offsets[e + 1] - begin, n = blocks(rows, piece);
        for (int64_t i = 0; i < n; i++) {
            const int64_t from = begin + rows * i / n, to = begin + rows * (i + 1) / n;
            pieces[count++] = {(int32_t)e, (int32_t)from, (int32_t)to, (int32_t)at};
            at += blocks(to - from, block) * block;
        }
    }
    return count;
}

// How many parts the tokens of the down product are split into, if it has too few units for the threads or the sums of the tokens do
// not fit into the cache. Each part reads or packs the weights again, which pays off if an average expert has many rows.
int64_t token_parts(int64_t T, int64_t units, int64_t E, int64_t K, int64_t sums, int threads) {
    const int64_t shares = units && threads > 1 ? blocks(2 * threads, units) : 1, fit = sums > shares ? sums : shares;
    const int64_t worth = T * K / (64 * (E ? E : 1)), parts = fit < worth ? fit : worth;
    return parts > 1 ? parts : 1;
}

// how the work is divided, and the layout of one call's scratch memory after the pieces
struct Parts {
    bool tiled;
    int64_t piece, block, h_stride, down_columns, token_parts, panels, up_bytes, down_bytes, sums_at, h, bytes;
};

Parts parts_of_scratch(int dtype, int64_t T, int64_t H, int64_t I, int64_t E, int64_t K, int threads) {
    const bool tiled = variant->kernels->tiled[dtype / 2];
    const int64_t piece = tiled ? Tiled::rows(H) : Experts::PIECE, block = tiled ? Tiled::BLOCK : 1;
    const int64_t slots = T * K, most = slots < Experts::PIECE ? slots : Experts::PIECE;  // rows of a piece
    // rows are read half as often, and every thread still has two units
    const bool broad = slots >= 64 * E && H >= 4 * Experts::PANEL * threads;
    const int64_t columns = tiled ? Tiled::COLUMNS : broad ? 2 * Experts::PANEL : Experts::PANEL, units = blocks(H, columns);
    const int64_t parts = token_parts(T, units, E, K, tiled ? blocks(T * columns * 4, Tiled::BYTES) : 1, threads);
    int64_t up = Experts::product(Experts::PANELS, most) * 4, down = Experts::product(columns / Experts::PANEL, most) * 4;
    if (tiled) up = (piece + Tiled::BLOCK) * (H + 31) * 2, down = columns * (I + 31) * 2;  // x and weights, or weights
    up = aligned(up), down = aligned(down);
    const int64_t with_sums = down + blocks(T, parts) * columns * 4, downs = parts * units;
    const int64_t ups = threads * up, all = (downs < threads ? downs : threads) * with_sums;
    const int64_t count = E + slots / piece, panels = aligned(count * sizeof(Piece)), h = panels + (ups > all ? ups : all);
    const int64_t rows = tiled ? slots + (count < slots ? count : slots) * (block - 1) : slots, length = tiled ? blocks(I, 32) * 32 : I;
    return {tiled, piece, block, length, columns, parts, panels, up, with_sums, down / 4, h, h + aligned(rows * length * size_of(dtype))};
}

// the end of the experts from `first` on that have up to `group` rows in total; at least one expert
int64_t end_of_group(const int32_t* offsets, int64_t first, int64_t E, int64_t group) {
    int64_t last = first + 1;
    while (last < E && offsets[last + 1] - offsets[first] <= group) last++;
    return last;
}

constexpr int64_t LEAVES_CACHES = 16 << 20;  // bytes of gradients above which no cache holds them until they are read

// how many panels of weights, of REACH x PANEL floats, fit into half of the second-level cache, and are read from there for every ROWS rows
int64_t fitting_panels() {
    int64_t panels = Experts::PANELS, bytes = 0;
#if defined(_SC_LEVEL2_CACHE_SIZE)
    bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
#endif
    while (panels > 1 && bytes > 0 && panels * Experts::REACH * Experts::PANEL * 4 * 2 > bytes) panels /= 2;
    return panels;
}

const int64_t FITTING_PANELS = fitting_panels();

// how many panels of n columns a unit has, so that every thread has units; there are `times` as many units as blocks of panels
int64_t panels_of(int64_t n, int64_t times, int threads, int64_t panels = FITTING_PANELS) {
    while (panels > 1 && times * blocks(n, panels * Experts::PANEL) < (threads > 1 ? 4 * threads : 1)) panels /= 2;
    return panels;
}

// columns of h per unit of `up`: several panels if there are many rows; with tiles too, as each unit packs x again
int64_t columns_of_up(bool tiled, int form, int64_t I, int64_t rows, int64_t n_pieces, int threads) {
    const int64_t C = Experts::COLUMNS, each = form ? C : Experts::PANEL, shares = n_pieces ? blocks(8 * threads, n_pieces) : 1;
    if (tiled) return blocks(I ? blocks(I, shares) : 1, C) * C;
    return rows < 16 * n_pieces ? each : each * panels_of(form ? 2 * I : I, n_pieces, threads);
}

// Writes a piece for each expert that has rows of the tokens first..last; returns how many.
int64_t pieces_of_tokens(
    const int32_t* offsets, const int32_t* row_token, int64_t E, int64_t first, int64_t last, Piece* pieces) {
    int64_t count = 0, at = 0;
    for (int64_t e = 0; e < E; e++) {
        const int64_t begin = moert::first_from(row_token, offsets[e], offsets[e + 1], first);
        const int64_t end = moert::first_from(row_token, begin, offsets[e + 1], last);
        if (begin == end) continue;
        pieces[count++] = {(int32_t)e, (int32_t)begin, (int32_t)end, (int32_t)at};
        at += end - begin;
    }
    return count;
}

// how the work on LoRA experts is divided, and the layout of its scratch memory
struct LoraParts {
    int64_t tokens, group, panels, panel_bytes, kept, bytes;  // tokens of a unit, and of a group of the backward pass
};

LoraParts lora_parts(int dtype, int64_t T, int64_t I, int64_t E, int64_t r, int64_t most, int backward, int threads) {
    constexpr int64_t LEAST = 16, SUMS = 1 << 17;  // tokens; floats of h that a unit sums
    const auto limit = [](int64_t n, int64_t limit) { return n < limit ? n : limit; };
    const int64_t slots = most ? most : 1;
    int64_t tokens = limit(blocks(LEAST * E, slots), SUMS / (I ? I : 1));  // enough that an expert has LEAST rows
    tokens = limit(tokens, blocks(T, threads > 1 ? 4 * threads : 1));
    int64_t group = LoraBackward::ELEMENTS / (3 * slots * (I ? I : 1)) / LEAST * LEAST;  // whatever the threads
    if (group < LEAST) group = LEAST;
    if (tokens < LEAST) tokens = LEAST;
    tokens = limit(tokens, group);
    LoraParts p;
    const int64_t pairs = backward ? LoraBackward::floats(r) : 0, rows = Lora::floats(tokens, I, r);
    p.tokens = tokens, p.group = group;
    p.panels = aligned(E * sizeof(Piece));
    p.panel_bytes = aligned(4 * (pairs > rows ? pairs : rows));
    p.kept = p.panels + threads * p.panel_bytes;
    p.bytes = p.kept + (backward ? aligned(limit(group, T) * slots * 3 * I * size_of(dtype)) : 0);
    return p;
}

// the layout of a backward pass's scratch memory, after the pieces
struct BackwardParts {
    int64_t experts, slot_row, panels, panel_bytes, dots, dz, wh, z, dx, bytes;
};

BackwardParts parts_of_backward(
    int dtype, int form, const int32_t* offsets, int64_t T, int64_t H, int64_t I, int64_t E, int64_t K, int64_t group,
    bool recompute, int threads) {
    typedef moert::ExpertsBackward B;
    int64_t most = 0;  // rows of a group
    for (int64_t first = 0, last; first < E; first = last) {
        last = end_of_group(offsets, first, E, group);
        if (most < offsets[last] - offsets[first]) most = offsets[last] - offsets[first];
    }
    const int64_t rows = Experts::product(Experts::PANELS), work = B::WEIGHTS > rows ? B::WEIGHTS : rows;
    const int64_t up = recompute && variant->kernels->tiled[dtype / 2] ? (H + 31) * (Experts::PIECE + Tiled::BLOCK) / 2 : 0;
    const int64_t panel = 4 * (work > up ? work : up), Z = form ? 2 * I : I, size = size_of(dtype);
    BackwardParts p;
    p.experts = aligned((E + T * K / Experts::PIECE) * sizeof(Piece));
    p.slot_row = p.experts + aligned(E * sizeof(Piece));
    p.panels = p.slot_row + aligned(T * K * sizeof(int32_t));
    p.panel_bytes = panel;
    p.dots = p.panels + threads * panel;
    p.dz = p.dots + aligned(blocks(I, Experts::PANEL) * most * 4);
    p.wh = p.dz + aligned(most * Z * size);
    p.z = p.wh + aligned(most * I * size);
    p.dx = p.z + (recompute ? aligned(most * Z * size) : 0);
    p.bytes = p.dx + aligned(T * K * H * size);
    return p;
}

}  // namespace

int moert_cpu_abi_version() { return MOERT_CPU_ABI_VERSION; }
const char* moert_cpu_build_info() { return MOERT_BUILD_INFO; }
const char* moert_cpu_variant() { return variant->name; }

const char* moert_cpu_variants() {
    static char names[64];
    char* end = names;
    for (const Variant& v : VARIANTS)
        if (v.runs()) end = stpcpy(stpcpy(end, v.name), " ");
    return names;
}

int moert_cpu_limit(const char* name) {
    for (const Variant& v : VARIANTS)
        if (!strcmp(v.name, name) && v.runs()) return variant = &v, 1;
    return 0;
}

void moert_cpu_use_openmp(const void* parallel, const void* thread_num, const void* num_threads) {
    omp_parallel = (Parallel)parallel;
    omp_thread = (Number)thread_num;
    omp_threads = (Number)num_threads;
}

int64_t moert_cpu_sort(
    const void* topk_idx, int idx_kind, int64_t slots, int64_t E, int32_t* offsets, int32_t* row_slot, int32_t* slot_row) {
    switch (idx_kind) {
        case 1: return sort((const uint8_t*)topk_idx, slots, E, offsets, row_slot, slot_row);
        case -1: return sort((const int8_t*)topk_idx, slots, E, offsets, row_slot, slot_row);
        case -2: return sort((const int16_t*)topk_idx, slots, E, offsets, row_slot, slot_row);
        case -4: return sort((const int32_t*)topk_idx, slots, E, offsets, row_slot, slot_row);
        default: return sort((const int64_t*)topk_idx, slots, E, offsets, row_slot, slot_row);
    }
}

void moert_cpu_plan(
    const int32_t* offsets, const int32_t* row_slot, int64_t T, int64_t K, int64_t E, int32_t* row_token, int32_t* slot_row,
    uint8_t* everyone) {
    for (int64_t r = 0; r < T * K; r++) {
        row_token[r] = row_slot[r] / (int32_t)K;
        slot_row[row_slot[r]] = (int32_t)r;
    }
    for (int64_t e = 0; e < E; e++) {
        const int32_t first = offsets[e];
        bool all = offsets[e + 1] - first == T;
        for (int64_t t = 0; all && t < T; t++) all = row_token[first + t] == t;
        everyone[e] = all;
    }
}

void moert_cpu_gather(const void* x, const int32_t* row_token, int64_t rows, int64_t bytes, void* out, int threads) {
    parallel(gather, Gather{(const char*)x, row_token, bytes, (char*)out}, rows, 2.0 * rows * bytes, threads);
}

void moert_cpu_activate(
    int dtype, int act, int form, float limit, float up_offset, const void* z, int64_t rows, int64_t I, void* h, int threads) {
    const moert::Forward f = {{act, form, limit, up_offset}, z, I, h};
    parallel(variant->kernels->activate[dtype / 2], f, rows, 12.0 * rows * I, threads);
}

void moert_cpu_activate_backward(
    int dtype, int act, int form, float limit, float up_offset, const void* z, const void* dh, const float* weight,
    const int32_t* row_slot, int64_t rows, int64_t I, void* dz, void* wh, float* dweight, int threads) {
    const moert::Backward b = {{act, form, limit, up_offset}, z, dh, weight, row_slot, I, dz, wh, dweight};
    parallel(variant->kernels->activate_backward[dtype / 2], b, rows, 24.0 * rows * I, threads);
}

void moert_cpu_combine(
    int dtype, const void* y, const float* weight, const int32_t* slot_row, int64_t T, int64_t K, int64_t H, int64_t rows,
    void* out, int threads) {
    const moert::Combine c = {y, weight, slot_row, K, H, rows, out};
    parallel(variant->kernels->combine[dtype / 2], c, T, (double)size_of(dtype) * T * (K + 1) * H, threads);
}

int64_t moert_cpu_experts_bytes(
    int dtype, int64_t T, int64_t H, int64_t I, int64_t E, int64_t K, int z_alone, int threads) {
    const Parts parts = parts_of_scratch(dtype, T, H, I, E, K, threads);
    return z_alone ? parts.panels + threads * parts.up_bytes : parts.bytes;
}

void moert_cpu_experts(
    int dtype, int act, int form, float limit, float up_offset, const void* x, const void* up, int64_t up_stride_e,
    int64_t up_stride, const void* down, int64_t down_stride_e, int64_t down_stride, const int32_t* trained_row,
    const void* up_trained, const void* down_trained, const void* up_bias, const void* down_bias, const float* weight,
    const int32_t* offsets, const int32_t* row_slot, int64_t T, int64_t H, int64_t I, int64_t E, int64_t K, int64_t first,
    int64_t last, void* scratch, void* z, void* out, int threads) {
    const Parts parts = parts_of_scratch(dtype, T, H, I, E, K, threads);
    char *const base = (char*)scratch, *const panels = base + parts.panels;
    Piece* pieces = (Piece*)base;
    const int64_t n_pieces = cut(offsets, first, last, parts.piece, parts.block, pieces), rows = offsets[last] - offsets[first];
    const int64_t up_columns = columns_of_up(parts.tiled, form, I, rows, n_pieces, threads);
    const Experts f = {
        {act, form, limit, up_offset}, x, up, down, up_bias, down_bias, up_stride_e, up_stride, down_stride_e, down_stride,
        trained_row, up_trained, down_trained, weight, row_slot, pieces, n_pieces, T, H, I, K, offsets[first],
        parts.token_parts, up_columns, parts.down_columns, parts.h_stride, parts.sums_at, out ? base + parts.h : nullptr, z, out,
    };
    // weights and rows, as few weights with many rows are also work
    const double bytes = (double)size_of(dtype) * ((double)n_pieces * I * H + (double)rows * (H + I));
    const int64_t ups = n_pieces * blocks(I, up_columns), downs = parts.token_parts * blocks(H, parts.down_columns);
    in_turns(variant->kernels->experts_up[dtype / 2], f, ups, 2 * bytes, threads, panels, parts.up_bytes);
    if (!out) return;
    in_turns(variant->kernels->experts_down[dtype / 2], f, downs, bytes, threads, panels, parts.down_bytes);
}

int64_t moert_cpu_experts_backward_bytes(
    int dtype, int form, const int32_t* offsets, int64_t T, int64_t H, int64_t I, int64_t E, int64_t K, int64_t group,
    int recompute, int threads) {
    return parts_of_backward(dtype, form, offsets, T, H, I, E, K, group, recompute, threads).bytes;
}

void moert_cpu_experts_backward(
    int dtype, int act, int form, float limit, float up_offset, const void* x, const void* dout, const void* up,
    int64_t up_stride_e, int64_t up_stride, const void* down, int64_t down_stride_e, int64_t down_stride,
    const int32_t* trained_row, const void* up_trained, const void* down_trained, const float* weight, const int32_t* offsets,
    const int32_t* row_slot, int64_t T, int64_t H, int64_t I, int64_t E, int64_t K, int64_t group, const int32_t* grad_row,
    const void* z, void* scratch, void* dx, float* dweight, void* dup, int64_t dup_stride_e,
    int64_t dup_stride, int up_adds, void* ddown, int64_t ddown_stride_e, int64_t ddown_stride, int down_adds, int threads) {
    typedef moert::ExpertsBackward B;
    const BackwardParts parts = parts_of_backward(dtype, form, offsets, T, H, I, E, K, group, !z, threads);
    const Kernels& run = *variant->kernels;
    char *const base = (char*)scratch, *const panels = base + parts.panels;
    Piece *const pieces = (Piece*)base, *const experts = (Piece*)(base + parts.experts);
    float* const dots = (float*)(base + parts.dots);
    const int64_t Z = form ? 2 * I : I, d = dtype / 2;
    int64_t trained = 0;
    for (int64_t e = 0; e < E; e++) trained += grad_row[e] >= 0 && offsets[e] < offsets[e + 1];
    const bool past = trained * (I + Z) * H * size_of(dtype) > LEAVES_CACHES;
    for (int64_t first = 0, last; first < E; first = last) {
        last = end_of_group(offsets, first, E, group);
        const int64_t n_pieces = cut(offsets, first, last, Experts::PIECE, 1, pieces), begin = offsets[first], rows = offsets[last] - begin;
        int64_t n = 0;
        for (int64_t e = first; e < last; e++)
            if (grad_row[e] >= 0 && offsets[e] < offsets[e + 1]) experts[n++] = {grad_row[e], offsets[e], offsets[e + 1], 0};
        const bool tiled = run.tiled[d];
        const int64_t dh_panels = panels_of(I, n_pieces, threads, tiled ? TiledBackward::panels(H) : FITTING_PANELS);
        const int64_t dx_panels = panels_of(H, n_pieces, threads, tiled ? TiledBackward::panels(Z) : FITTING_PANELS);
        const int64_t up_columns = columns_of_up(tiled, form, I, rows, n_pieces, threads);
        void* z_of = z ? (char*)z + begin * Z * size_of(dtype) : base + parts.z;
        const Experts f = {
            {act, form, limit, up_offset}, x, up, down, nullptr, nullptr, up_stride_e, up_stride, down_stride_e, down_stride,
            trained_row, up_trained, down_trained, weight, row_slot, pieces, n_pieces, T, H, I, K, begin,
            1, up_columns, Experts::PANEL, 0, 0, nullptr, z_of, nullptr,
        };
        const B b = {
            f, dout, experts, rows, dh_panels, dx_panels, blocks(Z, B::HIGH) * blocks(H, B::WIDE), blocks(H, B::HIGH) * blocks(I, B::WIDE),
            base + parts.dz, base + parts.wh, dots, up_adds != 0, down_adds != 0, past,
            dx ? base + parts.dx : nullptr, dup, ddown, dup_stride_e, dup_stride, ddown_stride_e, ddown_stride,
        };
        const double bytes = (double)size_of(dtype) * ((double)n_pieces * I * H + (double)rows * (H + I));
        const auto go = [&](auto kernel, const auto& work, int64_t units, double bytes) {
            in_turns(kernel, work, units, bytes, threads, panels, parts.panel_bytes);
        };
        if (!z) go(run.experts_up[d], f, n_pieces * blocks(I, up_columns), 2 * bytes);
        go(run.experts_dh[d], b, n_pieces * blocks(I, dh_panels * Experts::PANEL), bytes);
        for (int64_t r = 0; r < rows; r++) {
            float total = 0;
            for (int64_t block = 0; block < blocks(I, Experts::PANEL); block++) total += dots[block * rows + r];
            dweight[row_slot[begin + r]] = total;
        }
        if (dx) go(run.experts_dx[d], b, n_pieces * blocks(H, dx_panels * Experts::PANEL), 2 * bytes);
        go(run.experts_dw[d], b, n * ((dup ? b.up_units : 0) + (ddown ? b.down_units : 0)), 3 * bytes);
    }
    if (!dx) return;
    int32_t* const slot_row = (int32_t*)(base + parts.slot_row);
    for (int64_t r = 0; r < T * K; r++) slot_row[row_slot[r]] = (int32_t)r;
    moert_cpu_combine(dtype, base + parts.dx, nullptr, slot_row, T, K, H, offsets[E], dx, threads);
}

int64_t moert_cpu_lora_bytes(
    int dtype, int64_t T, int64_t I, int64_t E, int64_t r, int64_t most, int backward, int threads) {
    return lora_parts(dtype, T, I, E, r, most, backward, threads).bytes;
}

void moert_cpu_lora(
    int dtype, int act, float scaling, const void* z, const void* low, const void* gate_b, const void* up_b, const void* down_a,
    const int32_t* offsets, const int32_t* row_token, const float* weight, int64_t T, int64_t I, int64_t E, int64_t r, int64_t most,
    void* scratch, void* h, void* q, int threads) {
    const LoraParts parts = lora_parts(dtype, T, I, E, r, most, 0, threads);
    Piece* const pieces = (Piece*)scratch;
    const int64_t n = pieces_of_tokens(offsets, row_token, E, 0, T, pieces);
    const Lora f = {act, scaling, z, low, gate_b, up_b, down_a, row_token, weight, pieces, n, T, I, E, r, parts.tokens, h, q};
    const double bytes = (double)size_of(dtype) * I * (3.0 * E * r + 2.0 * T + 2.0 * offsets[E]);
    in_turns(variant->kernels->lora_forward[dtype / 2], f, blocks(T, parts.tokens), bytes, threads, (char*)scratch + parts.panels, parts.panel_bytes);
}

void moert_cpu_lora_backward(
    int dtype, int act, float scaling, const void* z, const void* low, const void* gate_b, const void* up_b, const void* down_a,
    const int32_t* offsets, const int32_t* row_token, const float* weight, int64_t T, int64_t I, int64_t E, int64_t r, int64_t most,
    void* scratch, const void* dh, const void* dq, void* dz, void* dlow, float* dots, float* dgate_b, float* dup_b, float* ddown_a,
    int threads) {
    const LoraParts parts = lora_parts(dtype, T, I, E, r, most, 1, threads);
    char* const base = (char*)scratch;
    Piece* const pieces = (Piece*)base;
    for (int64_t first = 0; first < T; first += parts.group) {
        const int64_t last = first + parts.group < T ? first + parts.group : T;
        const int64_t n = pieces_of_tokens(offsets, row_token, E, first, last, pieces);
        const Lora f = {act, scaling, z, low, gate_b, up_b, down_a, row_token, weight, pieces, n, T, I, E, r, parts.tokens, nullptr, nullptr};
        const LoraBackward b = {f, dh, dq, first, last, base + parts.kept, dz, dlow, dots, dgate_b, dup_b, ddown_a};
        const double bytes = (double)size_of(dtype) * I * (3.0 * E * r + 8.0 * (last - first));
        const auto go = [&](auto kernel, int64_t units) {
            in_turns(kernel, b, units, bytes, threads, base + parts.panels, parts.panel_bytes);
        };
        go(variant->kernels->lora_backward[dtype / 2], blocks(last - first, parts.tokens));
        if (dgate_b || dup_b || ddown_a) go(variant->kernels->lora_pairs[dtype / 2], n * 3 * blocks(I, Lora::PART));
    }
}

void moert_cpu_merge(
    int dtype, const void* weight, int64_t stride_e, const float* alpha, int64_t E, int64_t P, void* out, int threads) {
    const moert::Merge m = {weight, alpha, stride_e, E, P, out};
    parallel(
        variant->kernels->merge[dtype / 2], m, blocks(P, moert::Merge::BLOCK), (double)size_of(dtype) * (E + 1) * P, threads);
}

int64_t moert_cpu_merge_gradient_bytes(int64_t E, int64_t P) {
    return blocks(P, moert::Merge::BLOCK) * E * (int64_t)sizeof(float);
}

void moert_cpu_merge_gradient(
    int dtype, int dout_dtype, const void* dout, const void* weight, int64_t stride_e, int64_t E, int64_t P, void* scratch,
    float* dalpha, int threads) {
    const moert::MergeGradient m = {dout, weight, dout_dtype != 0, stride_e, E, P, (float*)scratch};
    const int64_t n = blocks(P, moert::Merge::BLOCK);
    parallel(variant->kernels->merge_gradient[dtype / 2], m, n, (double)size_of(dtype) * (E + 1) * P, threads);
    for (int64_t e = 0; e < E; e++) {
        double total = 0;
        for (int64_t block = 0; block < n; block++) total += m.parts[block * E + e];
        dalpha[e] = (float)total;
    }
}

void moert_cpu_unpack(
    int format, int dtype, const void* data, const void* scale, const float* nested, const float* map, float offset, int64_t e,
    int64_t P, int64_t Q, void* out, int threads) {
    const moert::Unpack u = {format, (const uint8_t*)data, scale, nested, map, offset, e, P, Q, out};
    parallel(variant->kernels->unpack[dtype / 2], u, P, (double)size_of(dtype) * P * Q, threads);
}

double moert_cpu_peak(int dtype, int64_t rounds, int64_t steps, float* sink, int threads) {
    const moert::Peak p = {steps, 0.5f, 0.25f, sink};
    const double sums = (double)rounds * steps * moert::Peak::SUMS;
    parallel(variant->kernels->peak[dtype / 2], p, rounds, 64 * sums, threads);
    return sums * variant->kernels->peak_flops[dtype / 2];
}
