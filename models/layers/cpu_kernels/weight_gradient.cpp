// Gradients of the weights of linear layers that share their input, in fp32 from operands in bf16: one product, whose sums are not rounded to bf16.
//
// oneDNN computes a product with a transposed left operand at half of its speed (AMX). Here a block of it is transposed in registers.
// The sums of an element are added in the order of the rows, whatever the blocks and the number of threads.

#include <ATen/native/CPUBlas.h>

#include "blocks.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace {

using at::native::cpublas::brgemm;
using at::native::cpublas::brgemm_release;

constexpr int64_t ROWS = 512;      // of g and x, whose products are added at a time: the operands of a block fit into the L2 cache
constexpr int64_t MIN_ROWS = 32;   // they are padded to a multiple of it
constexpr int64_t OUTPUTS = 256;   // of a block: rows of the gradient
constexpr int64_t INPUTS = 256;    // of a block: columns of the gradient

struct Block {
  int64_t column, outputs;  // of g
  float* gradient;
};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Blocks of the columns of g that are the outputs of the weights, about equally many for each thread.
std::vector<Block> find_blocks(int64_t parts, const int64_t* sizes, float* const* gradients, int64_t width, int threads) {
  std::vector<Block> blocks;
  for (int64_t i = 0, column = 0; i < parts; column += sizes[i++]) {
    const int64_t count = ceil_div(ceil_div(sizes[i], OUTPUTS), threads) * threads, size = ceil_div(ceil_div(sizes[i], count), LANES) * LANES;
    for (int64_t m = 0; m < sizes[i]; m += size) blocks.push_back({column + m, std::min(size, sizes[i] - m), gradients[i] + m * width});
  }
  return blocks;
}

// Transpose 16 x 16 elements of 4 bytes in registers; the i-th pair of rows of `from` (32 x 16, stride `ld`) is the i-th row of them.
void transpose_pairs(const bf16* from, int64_t ld, int64_t rows, bf16* to, int64_t to_ld) {
  Bits a[16], b[16];
  for (int64_t i = 0; i < 16; ++i) {
    Halves even{}, odd{};
    if (2 * i < rows) std::memcpy(&even, from + 2 * i * ld, sizeof even);
    if (2 * i + 1 < rows) std::memcpy(&odd, from + (2 * i + 1) * ld, sizeof odd);
    a[i] = __builtin_convertvector(even, Bits) | (__builtin_convertvector(odd, Bits) << 16);
  }
  // Exchange blocks of 1, 2, 4 and 8 elements between rows that are as far apart.
  for (int64_t i = 0; i < 16; i += 2) {
    b[i] = __builtin_shuffle(a[i], a[i + 1], Bits{0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30});
    b[i + 1] = __builtin_shuffle(a[i], a[i + 1], Bits{1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31});
  }
  for (int64_t i = 0; i < 16; i += 4)
    for (int64_t j = i; j < i + 2; ++j) {
      a[j] = __builtin_shuffle(b[j], b[j + 2], Bits{0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29});
      a[j + 2] = __builtin_shuffle(b[j], b[j + 2], Bits{2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31});
    }
  for (int64_t i = 0; i < 16; i += 8)
    for (int64_t j = i; j < i + 4; ++j) {
      b[j] = __builtin_shuffle(a[j], a[j + 4], Bits{0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27});
      b[j + 4] = __builtin_shuffle(a[j], a[j + 4], Bits{4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31});
    }
  for (int64_t j = 0; j < 8; ++j) {
    a[j] = __builtin_shuffle(b[j], b[j + 8], Bits{0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23});
    a[j + 8] = __builtin_shuffle(b[j], b[j + 8], Bits{8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31});
  }
  for (int64_t i = 0; i < 16; ++i) std::memcpy(static_cast<void*>(to + i * to_ld), &a[i], sizeof a[i]);
}

// x (rows, width) -> right operands of MIN_ROWS rows for each block of columns: (width / INPUTS, rows / 2, INPUTS, 2), zeros after the last row.
void pack_rows(const bf16* x, int64_t rows, int64_t start, int64_t padded, int64_t width, bf16* packed) {
  const int64_t whole = std::clamp<int64_t>(rows - start, 0, MIN_ROWS) / 2 * 2;
  for (int64_t n = 0; n < width; n += INPUTS) {
    const int64_t cols = std::min(INPUTS, width - n);
    bf16* to = packed + n * padded + start * cols;
    pack(x + start * width + n, width, whole, cols, to);
    if (whole == MIN_ROWS) continue;
    std::memset(static_cast<void*>(to + whole * cols), 0, (MIN_ROWS - whole) * cols * sizeof(bf16));
    if (start + whole < rows)  // the last one of an odd number
      for (int64_t j = 0; j < cols; ++j) to[whole * cols + 2 * j] = x[(start + whole) * width + n + j];
  }
}

int compute(const bf16* g, const bf16* x, bf16* packed, int64_t rows, int64_t outputs, int64_t width, const std::vector<Block>& blocks, int threads) {
  const int64_t padded = ceil_div(rows, MIN_ROWS) * MIN_ROWS;
  std::atomic<int> failed{0};
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64_t start = 0; start < padded; start += MIN_ROWS) pack_rows(x, rows, start, padded, width, packed);
    static thread_local Buffer<bf16> transposed;
#pragma omp for schedule(dynamic, 1)
    for (size_t i = 0; i < blocks.size(); ++i) {
      if (failed.load(std::memory_order_relaxed)) continue;
      try {
        const Block& block = blocks[i];
        bf16* g_t = transposed.get(OUTPUTS * ROWS);
        for (int64_t start = 0; start < padded; start += ROWS) {
          const int64_t count = std::min(ROWS, padded - start);
          for (int64_t k = 0; k < count; k += MIN_ROWS)
            for (int64_t m = 0; m < block.outputs; m += LANES)
              transpose_pairs(g + (start + k) * outputs + block.column + m, outputs, std::min(MIN_ROWS, rows - start - k), g_t + m * ROWS + k, ROWS);
          for (int64_t n = 0; n < width; n += INPUTS) {
            const int64_t cols = std::min(INPUTS, width - n);
            brgemm(block.outputs, cols, count, ROWS, cols, width, start > 0, g_t, packed + n * padded + start * cols, block.gradient + n, true);
          }
        }
      } catch (const std::bad_alloc&) {
        failed = 3;
      } catch (...) {
        failed = 1;
      }
    }
    if (!failed.load()) brgemm_release(true);
  }
  return failed.load();
}

}  // namespace

extern "C" {

// g: (rows, outputs) and x: (rows, width), contiguous, bf16 -> `parts` gradients of (sizes[i], width), fp32; sum of sizes: outputs; all sizes are
// multiples of 16. packed: memory for rows, rounded up to a multiple of 32, times width numbers in bf16.
int lm_runner_weight_gradients(
    const void* g, const void* x, void* packed, int64_t rows, int64_t outputs, int64_t width, int64_t parts, const int64_t* sizes, float* const* gradients, int threads) {
  const auto blocks = find_blocks(parts, sizes, gradients, width, threads);
  return compute(static_cast<const bf16*>(g), static_cast<const bf16*>(x), static_cast<bf16*>(packed), rows, outputs, width, blocks, threads);
}
}
