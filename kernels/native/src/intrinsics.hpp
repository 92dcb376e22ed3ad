// The vector instructions of x86-64. Other processors have the same operations by SIMDe
// (github.com/simd-everywhere/simde), which uses NEON on ARM.
#pragma once

#include <cstdint>

#ifdef __x86_64__
#include <immintrin.h>
#else
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx2.h>
#include <simde/x86/f16c.h>
#include <simde/x86/fma.h>
#endif

namespace warren {

// The bits of the register with the modes of arithmetic, with which denormal numbers are zero, as operands and as results.
#ifdef __x86_64__
inline uint64_t arithmetic_modes() { return _mm_getcsr(); }
inline void set_arithmetic_modes(uint64_t modes) { _mm_setcsr(static_cast<unsigned>(modes)); }
constexpr uint64_t kFlushesDenormals = _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON;
#else
inline uint64_t arithmetic_modes() { return __builtin_aarch64_get_fpcr64(); }
inline void set_arithmetic_modes(uint64_t modes) { __builtin_aarch64_set_fpcr64(modes); }
constexpr uint64_t kFlushesDenormals = uint64_t{1} << 24;  // FPCR.FZ
#endif

inline float from_half(uint16_t bits) {
#ifdef __x86_64__
    return _cvtsh_ss(bits);
#else
    __fp16 half;
    __builtin_memcpy(&half, &bits, sizeof half);
    return half;
#endif
}

}  // namespace warren
