// Products of matrices in bf16 on the CPU, summed in fp32 and rounded once: out (M, N) = A (M, K) B (K, N), where A and B may be transposed.
//
// Numbers are converted where operands are packed into blocks that fit the caches, so that no copy in fp32 of a whole operand is made. Blocks are those of
// K. Goto and R. van de Geijn, "Anatomy of High-Performance Matrix Multiplication", ACM TOMS 34(3), 2008. Blocks of K are summed alone and added in their order, whatever the
// number of threads.

#include "blocks.h"

#include <omp.h>

#include <algorithm>
#include <atomic>

namespace {

constexpr int64_t ROWS = 12, VECTORS = 2;  // of a tile, whose sums fill 24 of the 32 registers of AVX-512; with fewer registers the kernel is slow
constexpr int64_t COLS = VECTORS * LANES;
constexpr int64_t DEPTH = 256, WIDTH = 512;  // of a block of B in fp32: half a MiB
constexpr int64_t HEIGHT = 2040;  // of a block of A: sums of a bf16 result take 4 MiB of each thread at most
constexpr int64_t PITCH = DEPTH + LANES;  // between rows of A: not a power of two, which would map all rows to the same lines of the cache
static_assert(WIDTH % COLS == 0 && DEPTH % LANES == 0 && HEIGHT % ROWS == 0);

struct Operand {
  const bf16* data;
  int64_t row, column;  // strides; one of them is 1

  Operand at(int64_t i, int64_t j) const { return {data + i * row + j * column, row, column}; }
};

// to = a b, or sums + a b, added at the end: a sum of many blocks is more exact than one chain of additions.
// a: (ROWS, depth) with number (i, k) at i * ROW + k * STEP; b: (depth, COLS); to: (ROWS, COLS).
template <int64_t ROW, int64_t STEP, typename T>
void multiply_tile(const float* a, const float* b, int64_t depth, const float* sums, int64_t sums_ld, T* to, int64_t to_ld) {
  Floats tile[ROWS][VECTORS];
#pragma GCC unroll 12
  for (int64_t i = 0; i < ROWS; ++i)
#pragma GCC unroll 2
    for (int64_t j = 0; j < VECTORS; ++j) tile[i][j] = Floats{};
  for (int64_t k = 0; k < depth; ++k, a += STEP, b += COLS) {
    Floats right[VECTORS];
#pragma GCC unroll 2
    for (int64_t j = 0; j < VECTORS; ++j) {
      right[j] = load(b + j * LANES);
      __builtin_prefetch(b + 8 * COLS + j * LANES);
    }
#pragma GCC unroll 12
    for (int64_t i = 0; i < ROWS; ++i) {
      const Floats left = a[i * ROW] - Floats{};  // unlike 0 + x, x - 0 is x: no operation
#pragma GCC unroll 2
      for (int64_t j = 0; j < VECTORS; ++j) tile[i][j] += left * right[j];
    }
  }
#pragma GCC unroll 12
  for (int64_t i = 0; i < ROWS; ++i)
#pragma GCC unroll 2
    for (int64_t j = 0; j < VECTORS; ++j) store(to + i * to_ld + j * LANES, sums ? load(sums + i * sums_ld + j * LANES) + tile[i][j] : tile[i][j]);
}

// Contiguous numbers -> fp32.
void convert(const bf16* from, int64_t count, float* to) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) store(to + i, load(from + i));
  for (; i < count; ++i) to[i] = static_cast<float>(from[i]);
}

// (depth, cols) of B -> tiles of (depth, COLS), zeros after the last column.
void pack_right(const Operand& b, int64_t depth, int64_t cols, float* to) {
  for (int64_t n = 0; n < cols; n += COLS, to += depth * COLS) {
    const int64_t count = std::min(COLS, cols - n);
    if (b.column == 1) {
      for (int64_t k = 0; k < depth; ++k) {
        convert(b.data + k * b.row + n, count, to + k * COLS);
        std::fill(to + k * COLS + count, to + (k + 1) * COLS, 0.0f);
      }
      continue;
    }
    float columns[COLS][LANES] = {};
    for (int64_t k = 0; k < depth; k += LANES) {  // transposed
      const int64_t rows = std::min(LANES, depth - k);
      for (int64_t j = 0; j < count; ++j) convert(b.data + k + (n + j) * b.column, rows, columns[j]);
      for (int64_t i = 0; i < rows; ++i)
#pragma omp simd
        for (int64_t j = 0; j < COLS; ++j) to[(k + i) * COLS + j] = columns[j][i];
    }
  }
}

// (count, depth) of A -> (ROWS, depth) in rows of PITCH, or, where columns are contiguous, (depth, ROWS); zeros after the last row. `readable`: rows of A from here.
void pack_left(const Operand& a, int64_t count, int64_t depth, int64_t readable, float* to) {
  if (a.column == 1) {
    for (int64_t i = 0; i < ROWS; ++i)
      if (i < count)
        convert(a.data + i * a.row, depth, to + i * PITCH);
      else
        std::fill(to + i * PITCH, to + i * PITCH + depth, 0.0f);
  } else if (readable >= LANES) {
    for (int64_t k = 0; k < depth; ++k) store(to + k * ROWS, load(a.data + k * a.column));  // more than ROWS: the next one overwrites them
  } else {
    for (int64_t k = 0; k < depth; ++k)
      for (int64_t i = 0; i < ROWS; ++i) to[k * ROWS + i] = i < count ? static_cast<float>(a.data[i + k * a.column]) : 0.0f;
  }
}

// Memory of a thread.
struct Workspace {
  Buffer<float> left, right, sums;
};

template <typename T>
void multiply_tile_of(bool is_by_row, const float* a, const float* b, int64_t depth, const float* sums, int64_t sums_ld, T* to, int64_t to_ld) {
  if (is_by_row)
    multiply_tile<PITCH, 1>(a, b, depth, sums, sums_ld, to, to_ld);
  else
    multiply_tile<1, ROWS>(a, b, depth, sums, sums_ld, to, to_ld);
}

template <typename T>
void copy_tile(const T* from, int64_t from_ld, int64_t rows, int64_t cols, T* to, int64_t to_ld) {
  for (int64_t i = 0; i < rows; ++i) std::copy(from + i * from_ld, from + i * from_ld + cols, to + i * to_ld);
}

// A tile of `rows` x `cols` of `out`, in fp32: the sums are there already, from blocks before, or begin with this one.
void compute_tile(
    bool is_by_row, const float* a, const float* b, int64_t depth, bool adds, bool, float*, int64_t rows, int64_t cols, float* out, int64_t ld) {
  if (rows == ROWS && cols == COLS) return multiply_tile_of(is_by_row, a, b, depth, adds ? out : nullptr, ld, out, ld);
  float edge[ROWS * COLS] = {};
  if (adds) copy_tile(out, ld, rows, cols, edge, COLS);
  multiply_tile_of(is_by_row, a, b, depth, edge, COLS, edge, COLS);
  copy_tile(edge, COLS, rows, cols, out, ld);
}

// In bf16: `sums`, rows of WIDTH, has those of the blocks before; the last block rounds.
void compute_tile(
    bool is_by_row, const float* a, const float* b, int64_t depth, bool adds, bool is_last, float* sums, int64_t rows, int64_t cols, bf16* out, int64_t ld) {
  const float* before = adds ? sums : nullptr;
  if (!is_last) return multiply_tile_of(is_by_row, a, b, depth, before, WIDTH, sums, WIDTH);
  if (rows == ROWS && cols == COLS) return multiply_tile_of(is_by_row, a, b, depth, before, WIDTH, out, ld);
  bf16 edge[ROWS * COLS];
  multiply_tile_of(is_by_row, a, b, depth, before, WIDTH, edge, COLS);
  copy_tile(edge, COLS, rows, cols, out, ld);
}

// At most HEIGHT rows.
template <typename T>
void multiply_rows(const Operand& a, const Operand& b, T* out, int64_t ld, int64_t M, int64_t N, int64_t K, bool adds, Workspace& workspace) {
  const bool is_by_row = a.column == 1, has_sums = !std::is_same_v<T, float> && K > DEPTH;
  float* left = workspace.left.get(ROWS * PITCH + LANES);
  float* right = workspace.right.get(DEPTH * WIDTH);
  float* sums = has_sums ? workspace.sums.get((M + ROWS) * WIDTH) : nullptr;
  for (int64_t n = 0; n < N; n += WIDTH) {
    const int64_t width = std::min(WIDTH, N - n);
    for (int64_t k = 0; k < K; k += DEPTH) {
      const int64_t depth = std::min(DEPTH, K - k);
      pack_right(b.at(k, n), depth, width, right);
      for (int64_t m = 0; m < M; m += ROWS) {
        pack_left(a.at(m, k), std::min(ROWS, M - m), depth, M - m, left);
        for (int64_t j = 0; j < width; j += COLS)
          compute_tile(
              is_by_row, left, right + j * depth, depth, adds || k > 0, k + depth == K, has_sums ? sums + m * WIDTH + j : nullptr, std::min(ROWS, M - m),
              std::min(COLS, width - j), out + m * ld + n + j, ld);
      }
    }
  }
}

// The work of one thread.
template <typename T>
void multiply(const Operand& a, const Operand& b, T* out, int64_t ld, int64_t M, int64_t N, int64_t K, bool adds, Workspace& workspace) {
  for (int64_t m = 0; m < M; m += HEIGHT) multiply_rows(a.at(m, 0), b, out + m * ld, ld, std::min(HEIGHT, M - m), N, K, adds, workspace);
}

// Equal parts of the longer side for all threads.
template <typename T>
int multiply_parts(const Operand& a, const Operand& b, T* out, int64_t ld, int64_t M, int64_t N, int64_t K, bool adds, int threads) {
  std::atomic<int> failed{0};
#pragma omp parallel num_threads(threads)
  {
    static thread_local Workspace workspace;
    const int64_t parts = omp_get_num_threads(), part = omp_get_thread_num(), unit = M >= N ? ROWS : COLS, size = std::max(M, N);
    const int64_t step = ((size + parts - 1) / parts + unit - 1) / unit * unit, start = std::min(size, part * step), count = std::min(size - start, step);
    try {
      if (count > 0 && M >= N) multiply(a.at(start, 0), b, out + start * ld, ld, count, N, K, adds, workspace);
      if (count > 0 && M < N) multiply(a, b.at(0, start), out + start, ld, M, count, K, adds, workspace);
    } catch (const std::bad_alloc&) {
      failed = 3;
    }
  }
  return failed.load();
}

}  // namespace

extern "C" {

// a: (M, K), b: (K, N), bf16, with the strides of rows and columns, of which one is 1 -> out: (M, N) in rows of `ld`, in bf16 or, if `is_fp32`, fp32. `adds`, in
// fp32 only: the product is added to it.
int lm_runner_multiply(
    const void* a, int64_t a_row, int64_t a_column, const void* b, int64_t b_row, int64_t b_column, void* out, int64_t ld, int64_t M, int64_t N, int64_t K,
    int is_fp32, int adds, int threads) {
  const Operand left{static_cast<const bf16*>(a), a_row, a_column}, right{static_cast<const bf16*>(b), b_row, b_column};
  if (is_fp32) return multiply_parts(left, right, static_cast<float*>(out), ld, M, N, K, adds != 0, threads);
  return multiply_parts(left, right, static_cast<bf16*>(out), ld, M, N, K, false, threads);
}
}
