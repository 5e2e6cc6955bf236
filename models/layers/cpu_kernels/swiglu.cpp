// SwiGLU (https://arxiv.org/abs/2002.05202) on the CPU: silu(gate) * up and its gradients, in fp32 with one rounding at the end.
//
// x: (rows, 2 * width), gate and up side by side, as one product has computed them.

#include "vectors.h"

namespace {

inline Floats sigmoid(Floats x) {  // exp of a negative number only: no overflow
  const Floats e = exp_of(x < 0.0f ? x : -x);
  return (x < 0.0f ? e : all(1.0f)) / (1.0f + e);
}

template <typename T>
void forward(const T* x, T* h, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < width; j += LANES) {
      const Floats gate = load(x + 2 * i * width + j), up = load(x + (2 * i + 1) * width + j);
      store(h + i * width + j, gate * sigmoid(gate) * up);
    }
}

// h: (rows, width), on entry its gradient -> h again, and the gradient dx of x.
template <typename T>
void backward(const T* x, T* h, T* dx, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < width; j += LANES) {
      const int64_t at_gate = 2 * i * width + j, at_up = at_gate + width, at = i * width + j;
      const Floats gate = load(x + at_gate), up = load(x + at_up), g = load(h + at);
      const Floats s = sigmoid(gate), silu = gate * s;
      store(h + at, silu * up);
      store(dx + at_gate, g * up * (s + silu * (1.0f - s)));
      store(dx + at_up, g * silu);
    }
}

}  // namespace

extern "C" {

int lm_runner_swiglu_forward(const void* x, void* h, int64_t rows, int64_t width, int is_bf16, int threads) {
  if (is_bf16)
    forward(static_cast<const bf16*>(x), static_cast<bf16*>(h), rows, width, threads);
  else
    forward(static_cast<const float*>(x), static_cast<float*>(h), rows, width, threads);
  return 0;
}

int lm_runner_swiglu_backward(const void* x, void* h, void* dx, int64_t rows, int64_t width, int is_bf16, int threads) {
  if (is_bf16)
    backward(static_cast<const bf16*>(x), static_cast<bf16*>(h), static_cast<bf16*>(dx), rows, width, threads);
  else
    backward(static_cast<const float*>(x), static_cast<float*>(h), static_cast<float*>(dx), rows, width, threads);
  return 0;
}
}
