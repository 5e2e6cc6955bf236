// Attention within documents on x86 CPUs, forward and backward, as products of small blocks (oneDNN's brgemm, through the interface of libtorch).
//
// FlashAttention (https://arxiv.org/abs/2205.14135) on packed rows: a work item is one document of one key/value head, and its scores exist for one block
// of queries at a time. No work item writes what another one writes, so results do not depend on the number of threads.
//
// Shapes: B rows, T tokens, N query heads, K key/value heads, H head width, r = N / K, Q queries of a block, M = r * Q, L tokens of a document.
// A tensor is a pointer and three strides in elements: of rows, heads and tokens; a head's H elements are contiguous. T is the type of their numbers, C that
// of the operands of products, which may be float for tensors in bf16.

#include <ATen/native/CPUBlas.h>

#include "blocks.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

using at::native::cpublas::brgemm;
using at::native::cpublas::brgemm_release;

constexpr int64_t KEYS = 64;           // keys of a block
constexpr int64_t CHUNK = 8 * KEYS;    // keys whose scores exist at a time in the forward pass
constexpr int64_t MAX_ROWS = 128;      // rows of a block of queries, of all heads that share a key head, if a head has at most 128 / 16 of them

template <typename T>
struct View {
  T* data;
  int64_t row, head, token;
  T* at(int64_t b, int64_t n, int64_t t) const { return data + b * row + n * head + t * token; }
};

struct Shape {
  int64_t B, N, K, T, H;
  int64_t r = N / K, Q = std::max<int64_t>(16, std::min<int64_t>(KEYS, MAX_ROWS / r / 16 * 16));
};

struct Item {
  int64_t row, head, start, length;
};

// from (rows, cols), contiguous -> right operand of its transpose, cols x rows; cols is even.
template <typename T>
void pack_transposed(const T* from, int64_t rows, int64_t cols, T* to) {
  const int64_t width = cols / PAIR<T>;  // elements of 4 bytes
  const auto* in = reinterpret_cast<const uint32_t*>(from);
  auto* out = reinterpret_cast<uint32_t*>(to);
  for (int64_t j = 0; j < width; j += 8)
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t jj = j; jj < std::min(j + 8, width); ++jj) out[jj * rows + i] = in[i * width + jj];
}

template <typename T>
void transpose(const T* from, int64_t rows, int64_t cols, T* to) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < cols; ++j) to[j * rows + i] = from[i * cols + j];
}

// Tokens [start, start + count) of a head -> `to` (padded, H), zeros after `count`.
template <typename T, typename C>
void copy_tokens(const View<const T>& x, int64_t b, int64_t head, int64_t start, int64_t count, int64_t padded, int64_t H, C* to) {
  for (int64_t t = 0; t < count; ++t) {
    const T* from = x.at(b, head, start + t);
    if constexpr (std::is_same_v<T, C>) {
      std::memcpy(to + t * H, from, H * sizeof(T));
    } else {
      for (int64_t d = 0; d < H; d += LANES) store(to + t * H + d, load(from + d));
    }
  }
  std::memset(static_cast<void*>(to + count * H), 0, (padded - count) * H * sizeof(C));
}

// The documents of each row, longest first. Without a mask a row is one document; with one, (B, T, T), token t must attend to the tokens [first, t], and
// a document starts where first is t. Return whether the mask is of that kind.
bool find_items(const Shape& s, const uint8_t* mask, std::vector<Item>& items) {
  for (int64_t b = 0; b < s.B; ++b) {
    int64_t start = 0;
    if (mask && s.T > 0 && (!mask[b * s.T * s.T] || std::memchr(mask + b * s.T * s.T + 1, 1, s.T - 1))) return false;
    for (int64_t t = 1; t <= s.T; ++t) {
      bool ends = t == s.T;
      if (mask && !ends) {
        const uint8_t* allowed = mask + (b * s.T + t) * s.T;
        ends = !allowed[start];
        const int64_t first = ends ? t : start;
        if (std::memchr(allowed, 1, first) || std::memchr(allowed + first, 0, t + 1 - first) || std::memchr(allowed + t + 1, 1, s.T - t - 1)) return false;
      }
      if (!ends) continue;
      for (int64_t head = 0; head < s.K; ++head) items.push_back({b, head, start, t - start});
      start = t;
    }
  }
  std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.length > b.length; });
  return true;
}

template <typename T, typename C>
struct Forward {
  Shape s;
  View<const T> q, k, v;
  View<T> out;
  float* lse;  // (B, N, T), log of the sum of exponentials
  float scale;

  void operator()(const Item& item) const {
    static thread_local Buffer<C> keys_, values_, rows_, q_, probs_;
    static thread_local Buffer<float> scores_, sums_, out_;
    const int64_t r = s.r, Q = s.Q, M = r * Q, H = s.H, L = item.length;
    const int64_t blocks = (L + KEYS - 1) / KEYS;
    C *keys = keys_.get(blocks * KEYS * H), *values = values_.get(blocks * KEYS * H), *rows = rows_.get(KEYS * H);
    for (int64_t j = 0; j < blocks; ++j) {
      const int64_t count = std::min(KEYS, L - j * KEYS), start = item.start + j * KEYS;
      copy_tokens(k, item.row, item.head, start, count, KEYS, H, rows);
      pack_transposed(rows, KEYS, H, keys + j * KEYS * H);
      copy_tokens(v, item.row, item.head, start, count, KEYS, H, rows);
      pack(rows, H, KEYS, H, values + j * KEYS * H);
    }
    C *block = q_.get(M * H), *probs = probs_.get(M * CHUNK);
    float *scores = scores_.get(M * CHUNK), *o = out_.get(M * H), *largest = sums_.get(2 * M), *sum = largest + M;
    for (int64_t first = 0; first < L; first += Q) {
      const int64_t count = std::min(Q, L - first), used = (first + count + KEYS - 1) / KEYS;
      for (int64_t h = 0; h < r; ++h) copy_tokens(q, item.row, item.head * r + h, item.start + first, count, Q, H, block + h * Q * H);
      std::fill(largest, largest + M, -INFINITY);
      std::fill(sum, sum + M, 0.0f);
      for (int64_t j0 = 0; j0 < used; j0 += CHUNK / KEYS) {
        const int64_t j1 = std::min(used, j0 + CHUNK / KEYS);
        for (int64_t j = j0; j < j1; ++j)
          brgemm(M, KEYS, H, H, KEYS, CHUNK, false, block, keys + j * KEYS * H, scores + (j - j0) * KEYS, PAIR<C> == 2);
        for (int64_t i = 0; i < M; ++i)
          softmax_row(scores + i * CHUNK, probs + i * CHUNK, first + i % Q + 1 - j0 * KEYS, (j1 - j0) * KEYS, largest[i], sum[i], o + i * H, j0 > 0);
        for (int64_t j = j0; j < j1; ++j)
          brgemm(M, H, KEYS, CHUNK, H, H, j > 0, probs + (j - j0) * KEYS, values + j * KEYS * H, o, PAIR<C> == 2);
      }
      for (int64_t h = 0; h < r; ++h)
        for (int64_t i = 0; i < count; ++i) {
          const int64_t n = item.head * r + h, t = item.start + first + i, row = h * Q + i;
          lse[(item.row * s.N + n) * s.T + t] = largest[row] + std::log(sum[row]);
          const float inverse = 1.0f / sum[row];
          T* to = out.at(item.row, n, t);
          for (int64_t d = 0; d < H; d += LANES) store(to + d, load(o + row * H + d) * inverse);
        }
    }
  }

  // scores (width) of a query that attends to the first `allowed` keys -> exponentials; `largest` and `sum` run over the chunks, and `o` (H) is scaled to them.
  void softmax_row(const float* scores, C* probs, int64_t allowed, int64_t width, float& largest, float& sum, float* o, bool rescale) const {
    allowed = std::max<int64_t>(0, std::min(allowed, width));
    float m = largest;
    const int64_t filled = (allowed + LANES - 1) / LANES * LANES;
    Floats m_lanes = all(m), totals{};
    for (int64_t j = 0; j < filled; j += LANES) {
      const Floats x = load(scores + j) * scale;
      m_lanes = (LANE + static_cast<int32_t>(j) < static_cast<int32_t>(allowed)) & (x > m_lanes) ? x : m_lanes;
    }
    m = largest_of(m_lanes);
    for (int64_t j = 0; j < filled; j += LANES) {
      const Floats p = LANE + static_cast<int32_t>(j) < static_cast<int32_t>(allowed) ? exp_of(load(scores + j) * scale - m) : Floats{};
      totals += p;
      store(probs + j, p);
    }
    std::memset(static_cast<void*>(probs + filled), 0, (width - filled) * sizeof(C));
    if (rescale && m != largest) {
      const float factor = std::exp(largest - m);
      sum *= factor;
      for (int64_t d = 0; d < s.H; ++d) o[d] *= factor;
    }
    largest = m;
    sum += sum_of(totals);
  }
};

template <typename T, typename C>
struct Backward {
  Shape s;
  View<const T> g, q, k, v;
  const float* lse;
  View<T> dq, dk, dv;
  float scale;

  void operator()(const Item& item) const {
    static thread_local Buffer<C> keys_, keys_t_, values_, q_, block_, probs_;
    static thread_local Buffer<float> scores_, dkv_, dq_, rows_;
    const int64_t r = s.r, Q = s.Q, M = r * Q, H = s.H, L = item.length;
    const int64_t blocks = (L + KEYS - 1) / KEYS, padded = blocks * KEYS;
    C *keys = keys_.get(padded * H), *keys_t = keys_t_.get(padded * H), *values = values_.get(padded * H);
    copy_tokens(k, item.row, item.head, item.start, L, padded, H, keys);
    copy_tokens(v, item.row, item.head, item.start, L, padded, H, values);
    for (int64_t j = 0; j < blocks; ++j) transpose(keys + j * KEYS * H, KEYS, H, keys_t + j * KEYS * H);
    float *dk_sum = dkv_.get(2 * padded * H), *dv_sum = dk_sum + padded * H;
    std::fill(dk_sum, dk_sum + 2 * padded * H, 0.0f);
    C *q_rows = q_.get(4 * M * H), *q_t = q_rows + M * H, *g_rows = q_t + M * H, *g_t = g_rows + M * H, *block = block_.get(M * H);
    C *p = probs_.get(3 * KEYS * M), *ds = p + KEYS * M, *ds_packed = ds + KEYS * M;
    float *scores = scores_.get(2 * padded * M), *dp = scores + padded * M;  // padded x M, of all keys: 64 KiB for each block of them
    float *dq_sum = dq_.get(H * M + H), *dq_row = dq_sum + H * M, *norm = rows_.get(3 * M), *delta = norm + M, *total = delta + M;
    for (int64_t first = 0; first < L; first += Q) {
      const int64_t count = std::min(Q, L - first), used = (first + count + KEYS - 1) / KEYS;
      gather(q, item, first, count, block);
      pack(block, H, M, H, q_rows);
      pack_transposed(block, M, H, q_t);
      gather(g, item, first, count, block);
      pack(block, H, M, H, g_rows);
      pack_transposed(block, M, H, g_t);
      read_norm(item, first, count, norm);
      std::fill(delta, delta + 2 * M, 0.0f);
      for (int64_t j = 0; j < used; ++j) {
        float *scores_j = scores + j * KEYS * M, *dp_j = dp + j * KEYS * M;
        brgemm(KEYS, M, H, H, M, M, false, keys + j * KEYS * H, q_t, scores_j, PAIR<C> == 2);
        brgemm(KEYS, M, H, H, M, M, false, values + j * KEYS * H, g_t, dp_j, PAIR<C> == 2);
        for (int64_t c = 0; c < KEYS; ++c)
          for (int64_t h = 0; h < r; ++h) probabilities(scores_j, dp_j, norm, delta, total, c * M + h * Q, h * Q, j * KEYS + c - first);
      }
      for (int64_t i = 0; i < M; ++i) delta[i] /= total[i];
      for (int64_t j = 0; j < used; ++j) {
        score_gradients(scores + j * KEYS * M, dp + j * KEYS * M, delta, M, p, ds);
        pack(ds, M, KEYS, M, ds_packed);
        brgemm(KEYS, H, M, M, H, H, true, p, g_rows, dv_sum + j * KEYS * H, PAIR<C> == 2);
        brgemm(KEYS, H, M, M, H, H, true, ds, q_rows, dk_sum + j * KEYS * H, PAIR<C> == 2);
        brgemm(H, M, KEYS, KEYS, M, M, j > 0, keys_t + j * KEYS * H, ds_packed, dq_sum, PAIR<C> == 2);
      }
      for (int64_t h = 0; h < r; ++h)
        for (int64_t i = 0; i < count; ++i) {
          T* to = dq.at(item.row, item.head * r + h, item.start + first + i);
          for (int64_t d = 0; d < H; ++d) dq_row[d] = dq_sum[d * M + h * Q + i];
          for (int64_t d = 0; d < H; d += LANES) store(to + d, load(dq_row + d) * scale);
        }
    }
    for (int64_t t = 0; t < L; ++t) {
      T *to_k = dk.at(item.row, item.head, item.start + t), *to_v = dv.at(item.row, item.head, item.start + t);
      for (int64_t d = 0; d < H; d += LANES) {
        store(to_k + d, load(dk_sum + t * H + d) * scale);
        store(to_v + d, load(dv_sum + t * H + d));
      }
    }
  }

  void gather(const View<const T>& x, const Item& item, int64_t first, int64_t count, C* to) const {
    const int64_t r = s.r, Q = s.Q;
    for (int64_t h = 0; h < r; ++h) copy_tokens(x, item.row, item.head * r + h, item.start + first, count, Q, s.H, to + h * Q * s.H);
  }

  // The log-sum-exp of each query of a block; 0 for padded ones.
  void read_norm(const Item& item, int64_t first, int64_t count, float* norm) const {
    for (int64_t h = 0; h < s.r; ++h)
      for (int64_t i = 0; i < s.Q; ++i) norm[h * s.Q + i] = i < count ? lse[(item.row * s.N + item.head * s.r + h) * s.T + item.start + first + i] : 0.0f;
  }

  // Q scores of one key and head, from `at` on -> probabilities; queries before `hidden` come before the key. delta: the sum of p * dp over the keys. (The usual
  // sum of g * out has the error of the rounded output, the same for all keys: keys and values with a common mean would multiply it.)
  void probabilities(float* scores, const float* dp, const float* norm, float* delta, float* total, int64_t at, int64_t row, int64_t hidden) const {
    const int32_t Q = static_cast<int32_t>(s.Q), before = static_cast<int32_t>(std::clamp<int64_t>(hidden, 0, Q));
    for (int32_t i = 0; i < Q; i += LANES) {
      const Floats p = LANE + i < before ? Floats{} : exp_of(load(scores + at + i) * scale - load(norm + row + i));
      store(scores + at + i, p);
      store(total + row + i, load(total + row + i) + p);
      store(delta + row + i, load(delta + row + i) + (LANE + i < before ? Floats{} : p * load(dp + at + i)));
    }
  }

  // Probabilities and their gradients (KEYS, M) -> both as operands: p, and ds, the gradients of the scores. Padded queries have g, so dp, so ds of 0.
  void score_gradients(const float* probs, const float* dp, const float* delta, int64_t M, C* p, C* ds) const {
    for (int64_t c = 0; c < KEYS; ++c)
      for (int64_t i = 0; i < M; i += LANES) {
        const Floats x = load(probs + c * M + i);
        const Floats gradient = x * (load(dp + c * M + i) - load(delta + i));
        store(p + c * M + i, x);
        store(ds + c * M + i, x == 0.0f ? Floats{} : gradient);
      }
  }
};

// Run `work` for each document on `threads` threads. Return 0; 1 if this processor has no such product; 2 for another kind of mask; 3 if memory is short.
template <typename Work>
int run(const Work& work, const uint8_t* mask, int threads, bool pairs) {
  std::vector<Item> items;
  if (!find_items(work.s, mask, items)) return 2;
  std::atomic<int> failed{0};
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(dynamic, 1)
    for (size_t i = 0; i < items.size(); ++i) {
      if (failed.load(std::memory_order_relaxed)) continue;
      try {
        work(items[i]);
      } catch (const std::bad_alloc&) {
        failed = 3;
      } catch (...) {
        failed = 1;
      }
    }
    if (!failed.load()) brgemm_release(pairs);
  }
  return failed.load();
}

template <typename T>
View<T> view(const void* data, const int64_t*& strides) {
  View<T> x{static_cast<T*>(const_cast<void*>(data)), strides[0], strides[1], strides[2]};
  strides += 3;
  return x;
}

template <typename T, typename C>
int forward(const Shape& s, const int64_t* strides, const void* const* x, const uint8_t* mask, float* lse, float scale, int threads) {
  const auto q = view<const T>(x[0], strides), k = view<const T>(x[1], strides), v = view<const T>(x[2], strides);
  return run(Forward<T, C>{s, q, k, v, view<T>(x[3], strides), lse, scale}, mask, threads, PAIR<C> == 2);
}

template <typename T, typename C>
int backward(const Shape& s, const int64_t* strides, const void* const* x, const uint8_t* mask, const float* lse, float scale, int threads) {
  const auto g = view<const T>(x[0], strides), q = view<const T>(x[1], strides), k = view<const T>(x[2], strides), v = view<const T>(x[3], strides);
  const auto dq = view<T>(x[4], strides), dk = view<T>(x[5], strides), dv = view<T>(x[6], strides);
  return run(Backward<T, C>{s, g, q, k, v, lse, dq, dk, dv, scale}, mask, threads, PAIR<C> == 2);
}

}  // namespace

extern "C" {

enum Type { FP32, BF16, UPCAST };  // of the tensors; UPCAST: bf16, with products in fp32

// x: q, k, v, out; strides: three of each. mask: (B, T, T) bytes, or null.
int lm_runner_attention_forward(
    const int64_t* shape, const int64_t* strides, const void* const* x, const uint8_t* mask, float* lse, float scale, int64_t type, int threads) {
  const Shape s{shape[0], shape[1], shape[2], shape[3], shape[4]};
  return (type == BF16 ? forward<bf16, bf16> : type == UPCAST ? forward<bf16, float> : forward<float, float>)(s, strides, x, mask, lse, scale, threads);
}

// x: gradient of out, q, k, v, then the gradients of q, k, v, which are written.
int lm_runner_attention_backward(
    const int64_t* shape, const int64_t* strides, const void* const* x, const uint8_t* mask, const float* lse, float scale, int64_t type, int threads) {
  const Shape s{shape[0], shape[1], shape[2], shape[3], shape[4]};
  return (type == BF16 ? backward<bf16, bf16> : type == UPCAST ? backward<bf16, float> : backward<float, float>)(s, strides, x, mask, lse, scale, threads);
}
}
