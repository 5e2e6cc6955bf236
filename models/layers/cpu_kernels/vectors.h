// Vectors of 16 numbers for the kernels of this folder: loads and stores of fp32 and bf16, and exp.

#pragma once

#include <c10/util/BFloat16.h>

#include <cstdint>
#include <cstring>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

using bf16 = c10::BFloat16;

// 16 numbers, in the registers that the processor has (vector extension of GCC and Clang).
using Floats = float __attribute__((vector_size(64)));
using Ints = int32_t __attribute__((vector_size(64)));
using Bits = uint32_t __attribute__((vector_size(64)));
using Halves = uint16_t __attribute__((vector_size(32)));
constexpr int64_t LANES = 16;
constexpr Ints LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

template <typename To, typename From>
inline To as(const From& from) {
  To to;
  static_assert(sizeof to == sizeof from);
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline Floats all(float x) { return Floats{} + x; }

inline Floats load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
inline Floats load(const bf16* from) {
  Halves half;
  std::memcpy(&half, from, sizeof half);
  return as<Floats>(__builtin_convertvector(half, Bits) << 16);
}
inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }
inline void store(bf16* to, Floats x) {  // to nearest, ties to even
#ifdef __AVX512BF16__
  const auto half = _mm512_cvtneps_pbh(as<__m512>(x));
  std::memcpy(static_cast<void*>(to), &half, sizeof half);
#else
  const Bits bits = as<Bits>(x);
  const Bits rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  const Halves half = __builtin_convertvector(as<Ints>(x != x) ? Bits{} + 0x7FC0 : rounded, Halves);
  std::memcpy(static_cast<void*>(to), &half, sizeof half);
#endif
}

inline float sum_of(Floats x) {
  float lanes[LANES];
  store(lanes, x);
  for (int64_t half = LANES / 2; half; half /= 2)
    for (int64_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}
inline float largest_of(Floats x) {
  float lanes[LANES];
  store(lanes, x);
  for (int64_t half = LANES / 2; half; half /= 2)
    for (int64_t i = 0; i < half; ++i) lanes[i] = lanes[i + half] > lanes[i] ? lanes[i + half] : lanes[i];
  return lanes[0];
}

// exp for x <= 0 with a relative error of 2e-7 (the polynomial of Cephes, https://netlib.org/cephes). NaN stays NaN.
inline Floats exp_of(Floats x) {
  x = x < -87.0f ? all(-87.0f) : x;
  const Floats rounded = x * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23: the sum is rounded to an integer
  const Floats n = rounded - 12582912.0f;
  const Floats f = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats p = f * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  p = p * f * f + f + 1.0f;
  return p * as<Floats>((as<Ints>(rounded) - 0x4B400000 + 127) << 23);
}

}  // namespace
