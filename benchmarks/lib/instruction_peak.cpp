// Loops of one multiply-add instruction on registers, with enough independent sums to hide its latency.

#include <cstdint>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int SUMS = 16;  // registers: half of those of AVX-512; of the 16 of AVX2 only USED

#ifdef __AVX512F__
constexpr int LANES = 16, USED = SUMS;
using Floats = __m512;
inline Floats all(float x) { return _mm512_set1_ps(x); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int LANES = 8, USED = 12;
using Floats = __m256;
inline Floats all(float x) { return _mm256_set1_ps(x); }
inline Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
#else
constexpr int LANES = 0, USED = 0;
#endif

template <typename Operand, typename Step>
float repeat(Operand a, Operand b, int64_t rounds, Step step) {
#ifdef __AVX2__
  Floats sums[SUMS];
  for (auto& sum : sums) sum = all(0.0f);
  asm volatile("" : "+v"(a), "+v"(b));  // the compiler does not know their values
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < USED; ++j) sums[j] = step(a, b, sums[j]);
  }
  Floats total = sums[0];
  for (int j = 1; j < USED; ++j) total += sums[j];
  return total[0];
#else
  return 0.0f;
#endif
}

}  // namespace

extern "C" {

// Each computes `rounds` times USED instructions, writes a sum of them to `out`, and returns the operations of one round; 0: not on this processor.

int64_t lm_runner_multiply_add_fp32(int64_t rounds, float* out) {
#ifdef __AVX2__
  *out = repeat(all(1.0f), all(1e-6f), rounds, [](Floats a, Floats b, Floats c) { return multiply_add(a, b, c); });
#endif
  return USED * LANES * 2;
}

int64_t lm_runner_multiply_add_bf16(int64_t rounds, float* out) {
#ifdef __AVX512BF16__
  const auto one = (__m512bh)_mm512_set1_epi16(0x3f80), small = (__m512bh)_mm512_set1_epi16(0x3580);
  *out = repeat(one, small, rounds, [](__m512bh a, __m512bh b, Floats c) { return _mm512_dpbf16_ps(c, a, b); });
  return USED * LANES * 2 * 2;
#else
  return 0;
#endif
}
}
