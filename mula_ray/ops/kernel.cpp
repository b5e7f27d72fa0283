// The memory-bound passes between the GEMMs of the CPU backend, fused. Built by kernel.py, called through ctypes.
// Plain loops that a compiler turns into vector code; no unsafe maths flags, sums in a fixed order: same input and
// thread count, same bits. Rows of a block are sorted by token, so repeats of a token are neighbours.

#include <cstdint>
#include <cstring>

#define PRAGMA(text) _Pragma(#text)
#ifdef _OPENMP
#define PARALLEL_FOR(threads) PRAGMA(omp parallel for schedule(static) num_threads(threads) if (threads > 1))
#define SIMD_SUM(sum) PRAGMA(omp simd reduction(+ : sum))
#else
#define PARALLEL_FOR(threads)
#define SIMD_SUM(sum)
#endif

namespace {

inline float widen(uint16_t bits) {
  uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

inline float widen(float value) { return value; }

// e^x within 2 ulp for |x| <= 87, clamped outside: 2^n * p(r), r = x - n ln 2, |r| <= ln(2) / 2.
inline float exp_fast(float x) {
  x = x < -87.0f ? -87.0f : (x > 87.0f ? 87.0f : x);
  const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low mantissa bits
  float biased = x * 1.44269504088896341f + shift;
  float n = biased - shift;
  float r = x - n * 0.693145751953125f;
  r = r - n * 1.42860677e-6f;
  float p = 1.3888889e-3f;
  p = p * r + 8.3333333e-3f;
  p = p * r + 4.1666667e-2f;
  p = p * r + 1.6666667e-1f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  int32_t bits;
  std::memcpy(&bits, &biased, 4);
  int32_t scale_bits = (bits - 0x4B400000 + 127) << 23;
  float scale;
  std::memcpy(&scale, &scale_bits, 4);
  return p * scale;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exp_fast(-x)); }

template <typename T>
void gather_rows(const T* source, const int64_t* token, int64_t rows, int64_t width, float* out, int threads) {
  PARALLEL_FOR(threads)
  for (int64_t row = 0; row < rows; ++row) {
    const T* from = source + token[row] * width;
    float* to = out + row * width;
    for (int64_t i = 0; i < width; ++i) to[i] = widen(from[i]);
  }
}

}  // namespace

extern "C" {

// Stable counting sort of `slots` expert ids; ids outside [0, experts) are left out. offsets has experts + 1 entries.
void plan_rows(const int64_t* ids, int64_t slots, int64_t top_k, int64_t experts, int64_t* slot, int64_t* token,
               int64_t* offsets, int64_t* cursor) {
  std::memset(cursor, 0, sizeof(int64_t) * experts);
  for (int64_t i = 0; i < slots; ++i)
    if (static_cast<uint64_t>(ids[i]) < static_cast<uint64_t>(experts)) ++cursor[ids[i]];
  offsets[0] = 0;
  for (int64_t e = 0; e < experts; ++e) {
    offsets[e + 1] = offsets[e] + cursor[e];
    cursor[e] = offsets[e];
  }
  for (int64_t t = 0, i = 0; i < slots; ++t)
    for (int64_t end = i + top_k; i < end; ++i)
      if (static_cast<uint64_t>(ids[i]) < static_cast<uint64_t>(experts)) {
        int64_t at = cursor[ids[i]]++;
        slot[at] = i;
        token[at] = t;
      }
}

void gather_f32(const float* source, const int64_t* token, int64_t rows, int64_t width, float* out, int threads) {
  gather_rows(source, token, rows, width, out, threads);
}

void gather_bf16(const uint16_t* source, const int64_t* token, int64_t rows, int64_t width, float* out, int threads) {
  gather_rows(source, token, rows, width, out, threads);
}

// out[token] += rows. A thread's share starts where the token changes, so no two threads write one row.
void scatter_add(const float* rows_in, const int64_t* token, int64_t rows, int64_t width, float* out, int threads) {
  PARALLEL_FOR(threads)
  for (int share = 0; share < threads; ++share) {
    int64_t start = rows * share / threads, stop = rows * (share + 1) / threads;
    while (start > 0 && start < rows && token[start] == token[start - 1]) ++start;
    while (stop > 0 && stop < rows && token[stop] == token[stop - 1]) ++stop;
    for (int64_t row = start; row < stop; ++row) {
      const float* from = rows_in + row * width;
      float* to = out + token[row] * width;
      for (int64_t i = 0; i < width; ++i) to[i] += from[i];
    }
  }
}

// act = silu(gate) * up * weight, h = [gate | up] of `width` each.
void swiglu(const float* h, const float* weight, int64_t rows, int64_t width, float* act, int threads) {
  PARALLEL_FOR(threads)
  for (int64_t row = 0; row < rows; ++row) {
    const float *gate = h + row * 2 * width, *up = gate + width;
    float* out = act + row * width;
    const float w = weight[row];
    for (int64_t i = 0; i < width; ++i) out[i] = gate[i] * sigmoid(gate[i]) * up[i] * w;
  }
}

// With s = sigmoid(gate), a = gate s: act = a up w; dweight = sum(dact a up); dup = dact w a;
// dgate = dact w up (s + a (1 - s)).
void swiglu_backward(const float* h, const float* weight, const float* dact, int64_t rows, int64_t width, float* act,
                     float* dh, float* dweight, int threads) {
  PARALLEL_FOR(threads)
  for (int64_t row = 0; row < rows; ++row) {
    const float *gate = h + row * 2 * width, *up = gate + width, *d = dact + row * width;
    float *out = act + row * width, *dgate = dh + row * 2 * width, *dup = dgate + width;
    const float w = weight[row];
    float sum = 0.0f;
    SIMD_SUM(sum)
    for (int64_t i = 0; i < width; ++i) {
      const float s = sigmoid(gate[i]), a = gate[i] * s, dw = d[i] * w, au = a * up[i];
      out[i] = au * w;
      dup[i] = dw * a;
      dgate[i] = dw * up[i] * (s + a * (1.0f - s));
      sum += d[i] * au;
    }
    dweight[row] = sum;
  }
}

}  // extern "C"
