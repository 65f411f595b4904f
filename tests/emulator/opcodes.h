// Semantics that stand in files of their own.
#pragma once

#include "machine.h"

namespace emulator {

// copies.cpp
void copy_async(Warp& warp, const Instruction& at, uint32_t mask);
void copy_commit(Warp& warp, const Instruction& at, uint32_t mask);
void copy_wait(Warp& warp, const Instruction& at, uint32_t mask);
void bulk_copy(Warp& warp, const Instruction& at, uint32_t mask);
void bulk_commit(Warp& warp, const Instruction& at, uint32_t mask);
void bulk_wait(Warp& warp, const Instruction& at, uint32_t mask);
void barrier_init(Warp& warp, const Instruction& at, uint32_t mask);
void barrier_invalidate(Warp& warp, const Instruction& at, uint32_t mask);
void barrier_arrive(Warp& warp, const Instruction& at, uint32_t mask);
void barrier_wait(Warp& warp, const Instruction& at, uint32_t mask);

// matrices.cpp
void load_matrix(Warp& warp, const Instruction& at, uint32_t mask);
void store_matrix(Warp& warp, const Instruction& at, uint32_t mask);
void multiply(Warp& warp, const Instruction& at, uint32_t mask);
void product_fence(Warp& warp, const Instruction& at, uint32_t mask);
void product_issue(Warp& warp, const Instruction& at, uint32_t mask);
void product_commit(Warp& warp, const Instruction& at, uint32_t mask);
void product_wait(Warp& warp, const Instruction& at, uint32_t mask);

// tensors.cpp
void tensor_allocate(Warp& warp, const Instruction& at, uint32_t mask);
void tensor_free(Warp& warp, const Instruction& at, uint32_t mask);
void tensor_multiply(Warp& warp, const Instruction& at, uint32_t mask);
void tensor_commit(Warp& warp, const Instruction& at, uint32_t mask);
void tensor_load(Warp& warp, const Instruction& at, uint32_t mask);
void tensor_store(Warp& warp, const Instruction& at, uint32_t mask);
void tensor_wait(Warp& warp, const Instruction& at, uint32_t mask);

}  // namespace emulator
