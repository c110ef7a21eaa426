// Conversion of stored values to float32 and back, a block at a time: loops that the compiler vectorizes.
#pragma once

#include "kernels.hpp"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

// The same code is compiled for several instruction sets: functions that are not inlined must be private to the source.
#define PARTITA_INLINE static inline __attribute__((always_inline))

namespace partita {
namespace PARTITA_LEVEL {

PARTITA_INLINE std::uint32_t bits_of(float x) { return __builtin_bit_cast(std::uint32_t, x); }
PARTITA_INLINE float float_of(std::uint32_t x) { return __builtin_bit_cast(float, x); }

constexpr std::uint32_t SIGN = 0x80000000u;
constexpr std::uint32_t INFINITE = 0x7F800000u;

// ---------------------------------------------------------------- 16-bit floats

PARTITA_INLINE float from_bf16(std::uint16_t x) { return float_of(std::uint32_t(x) << 16); }

// To nearest, ties away from zero: the only rounding that 16 more bits can undo (see `split`).
PARTITA_INLINE std::uint16_t to_bf16(float x) { return std::uint16_t((bits_of(x) + 0x8000u) >> 16); }

PARTITA_INLINE float from_fp16(std::uint16_t x) {
    const std::uint32_t magnitude = x & 0x7FFFu;
    // Subnormal numbers: the last bit of 0.5 has the weight of the last bit of fp16.
    const float small = float_of(magnitude | 0x3F000000u) - 0.5f;
    const std::uint32_t rebias = magnitude >= 0x7C00u ? 224u << 23 : 112u << 23;
    const std::uint32_t large = (magnitude << 13) + rebias;
    const std::uint32_t out = magnitude < 0x400u ? bits_of(small) : large;
    return float_of(out | (std::uint32_t(x & 0x8000u) << 16));
}

// To nearest, ties to even.
PARTITA_INLINE std::uint16_t to_fp16(float x) {
    const std::uint32_t magnitude = bits_of(x) & ~SIGN;
    const std::uint32_t small = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u;
    const std::uint32_t normal = (magnitude + 0xFFFu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
    const std::uint32_t special = magnitude > INFINITE ? 0x7E00u : 0x7C00u;
    std::uint32_t out = magnitude < 0x38800000u ? small : normal;
    out = magnitude >= 0x477FF000u ? special : out;
    return std::uint16_t(out | (bits_of(x) >> 16 & 0x8000u));
}

// The length of a full block is a compile-time constant.
template <bool full>
PARTITA_INLINE int length(int n) { return full ? BLOCK : n; }

template <bool full>
PARTITA_INLINE void load(float* __restrict out, const void* data, Dtype dtype, std::int64_t at, int n) {
    n = length<full>(n);
    if (dtype == Dtype::fp32) {
        const float* __restrict in = static_cast<const float*>(data) + at;
        for (int i = 0; i < n; ++i) out[i] = in[i];
    } else if (dtype == Dtype::bf16) {
        const std::uint16_t* __restrict in = static_cast<const std::uint16_t*>(data) + at;
        for (int i = 0; i < n; ++i) out[i] = from_bf16(in[i]);
    } else {
        const std::uint16_t* __restrict in = static_cast<const std::uint16_t*>(data) + at;
        int i = 0;
#if defined(__F16C__)
        for (; i + 8 <= n; i += 8)
            _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
#endif
        for (; i < n; ++i) out[i] = from_fp16(in[i]);
    }
}

template <bool full>
PARTITA_INLINE void encode_fp16(std::uint16_t* __restrict out, const float* __restrict in, int n) {
    n = length<full>(n);
    int i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < n; ++i) out[i] = to_fp16(in[i]);
}

// The 16-bit parameter of a master.
template <bool full>
PARTITA_INLINE void encode_param(std::uint16_t* __restrict out, const float* __restrict in, Dtype dtype, int n) {
    n = length<full>(n);
    if (dtype == Dtype::fp16) return encode_fp16<full>(out, in, n);
    for (int i = 0; i < n; ++i) out[i] = to_bf16(in[i]);
}

// Writes a full block, bypassing the caches, so that the line is not read first. Both are aligned to 64 bytes.
PARTITA_INLINE void write_through(std::uint16_t* out, const std::uint16_t* in) {
#if defined(__AVX512F__)
    for (int i = 0; i < BLOCK; i += 32)
        _mm512_stream_si512(reinterpret_cast<__m512i*>(out + i), _mm512_load_si512(in + i));
#elif defined(__AVX2__)
    for (int i = 0; i < BLOCK; i += 16)
        _mm256_stream_si256(reinterpret_cast<__m256i*>(out + i),
                            _mm256_load_si256(reinterpret_cast<const __m256i*>(in + i)));
#elif defined(__SSE2__)
    for (int i = 0; i < BLOCK; i += 8)
        _mm_stream_si128(reinterpret_cast<__m128i*>(out + i), _mm_load_si128(reinterpret_cast<const __m128i*>(in + i)));
#else
    for (int i = 0; i < BLOCK; ++i) out[i] = in[i];
#endif
}

// Orders the writes that bypass the caches before later synchronization with other threads.
PARTITA_INLINE void fence() {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

// ---------------------------------------------------------------- split master

// master bits = (param bits << 16) + low, modulo 2^32, with param the bf16 number nearest to the master and low the
// signed remainder. 2^32 masters are 2^16 params times 2^16 remainders, so each param must have the same number of
// masters: ties round away from zero (rounded to even, even params would have 65537 masters and odd ones 65535).
template <bool full>
PARTITA_INLINE void join(float* __restrict out, const std::uint16_t* __restrict param,
                         const std::int16_t* __restrict low, int n) {
    n = length<full>(n);
    for (int i = 0; i < n; ++i)
        out[i] = float_of((std::uint32_t(param[i]) << 16) + std::uint32_t(std::int32_t(low[i])));
}

template <bool full>
PARTITA_INLINE void split(std::uint16_t* __restrict param, std::int16_t* __restrict low, const float* __restrict in,
                          int n) {
    n = length<full>(n);
    for (int i = 0; i < n; ++i) {
        const std::uint32_t bits = bits_of(in[i]);
        param[i] = std::uint16_t((bits + 0x8000u) >> 16);
        low[i] = std::int16_t(std::uint16_t(bits));
    }
}

// ---------------------------------------------------------------- 8-bit moments

// A magnitude x of a block of scale s becomes u = 1 + x / s * RANGE. The code is u's floating-point representation,
// truncated to 4 bits of mantissa: 16 even steps in each of 8 (signed) or 16 (unsigned) octaves. Before truncation a
// dither of less than a step is added, so that the decoded value is unbiased. The ranges are slightly below u's last
// code, so that the dither cannot exceed it.
constexpr float SIGNED_RANGE = 246.999f;     // u < 248 = 31/16 * 2^7: code 127
constexpr float UNSIGNED_RANGE = 63486.5f;   // u < 63488 = 31/16 * 2^15: code 255
constexpr int CUT = 19;
constexpr std::uint32_t ONE = 0x3F800000u;
constexpr float LEAST_SCALE = 0x1p-100f;     // steps and inverses of smaller scales would leave float32's range

// A signed code is its sign bit and the magnitude's code.
PARTITA_INLINE float decode_signed(std::int8_t code, float unit) {
    const std::uint32_t wide = std::uint32_t(std::int32_t(code));
    const float x = (float_of(((wide & 0x7Fu) << CUT) + ONE) - 1.0f) * unit;
    return float_of(bits_of(x) | (wide & SIGN));
}

PARTITA_INLINE float decode_unsigned(std::uint8_t code, float unit) {
    return (float_of((std::uint32_t(code) << CUT) + ONE) - 1.0f) * unit;
}

PARTITA_INLINE std::int32_t encode_signed(float x, float inverse, std::uint32_t dither) {
    const float u = float_of(bits_of(x) & ~SIGN) * inverse + 1.0f;
    const std::uint32_t code = (bits_of(u) + dither - ONE) >> CUT;
    return std::int32_t(code | (bits_of(x) >> 24 & 0x80u));
}

// Nonzero (normal) values never become zero, because updates divide by their root.
PARTITA_INLINE std::int32_t encode_unsigned(float x, float inverse, std::uint32_t dither) {
    const float u = x * inverse + 1.0f;
    const std::uint32_t bits = bits_of(u) + dither - ONE, first = 1u << CUT;
    const std::uint32_t least = bits_of(x) < first ? bits_of(x) : first;
    return std::int32_t((bits < least ? least : bits) >> CUT);
}

// The low 8 bits of each number; the other bits are zero.
template <bool full>
PARTITA_INLINE void narrow(void* data, const std::int32_t* __restrict in, int n) {
    std::uint8_t* __restrict out = static_cast<std::uint8_t*>(data);
    int i = 0;
#if defined(__AVX512F__)
    for (; full && i < BLOCK; i += 16)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i),
                         _mm512_maskz_cvtepi32_epi8(0xFFFF, _mm512_load_si512(in + i)));
#elif defined(__AVX2__)
    // Packing works within each half of a vector; the permutation restores the order of the quarters.
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i* from = reinterpret_cast<const __m256i*>(in);
    for (; full && i < BLOCK; i += 32, from += 4) {
        const __m256i low = _mm256_packs_epi32(_mm256_load_si256(from), _mm256_load_si256(from + 1));
        const __m256i high = _mm256_packs_epi32(_mm256_load_si256(from + 2), _mm256_load_si256(from + 3));
        const __m256i packed = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), packed);
    }
#endif
    for (n = length<full>(n); i < n; ++i) out[i] = std::uint8_t(in[i]);
}

PARTITA_INLINE float scale_of(float largest) { return largest < LEAST_SCALE ? LEAST_SCALE : largest; }

// The random numbers of a step, one for each index in a block.
PARTITA_INLINE void fill_dither(std::uint32_t* out, std::uint32_t salt) {
    for (std::uint32_t i = 0; i < std::uint32_t(BLOCK); ++i) {
        std::uint32_t hash = (salt * std::uint32_t(BLOCK) + i) * 0x9E3779B1u;
        hash = (hash ^ (hash >> 15)) * 0x85EBCA77u;
        hash = (hash ^ (hash >> 13)) * 0xC2B2AE3Du;
        out[i] = hash ^ (hash >> 16);
    }
}

// Different numbers for different blocks: the last bits of each moment are mixed into the dither of the other.
PARTITA_INLINE std::uint32_t mix(std::uint32_t random, float first, float second) {
    return (random + bits_of(first)) ^ (bits_of(second) << 16);
}

PARTITA_INLINE std::uint32_t dither_of_first(std::uint32_t mixed) { return mixed >> (32 - CUT); }
PARTITA_INLINE std::uint32_t dither_of_second(std::uint32_t mixed) { return mixed & ((1u << CUT) - 1u); }

}  // namespace PARTITA_LEVEL
}  // namespace partita
