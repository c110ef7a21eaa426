// Encoding of floats for communication, block by block: a record has the block's step (float32) and its codes.
// partita/kernels/codec_reference.py defines every bit of it.
#pragma once

#include <cstring>

#include "chunks.hpp"

namespace partita {
namespace PARTITA_LEVEL {

// Codes 0 ... 2 * center represent (code - center) * step. The largest magnitude is the last level; but if `width` is
// not 0 and codes are rounded to nearest, the step is `width` mean magnitudes, and larger values are clamped.
template <Codec codec> struct Levels;
// clang-format off
template <> struct Levels<Codec::int8>     { static constexpr float center = 127.0f, width = 0.0f;  static constexpr int digits = 1; };
template <> struct Levels<Codec::int4>     { static constexpr float center = 7.0f,   width = 0.0f;  static constexpr int digits = 2; };
template <> struct Levels<Codec::two_bits> { static constexpr float center = 1.5f,   width = 1.25f; static constexpr int digits = 4; };
template <> struct Levels<Codec::ternary>  { static constexpr float center = 1.0f,   width = 1.4f;  static constexpr int digits = 5; };
template <> struct Levels<Codec::sign>     { static constexpr float center = 0.5f,   width = 2.0f;  static constexpr int digits = 8; };
// clang-format on

constexpr int STEP_BYTES = 4;
constexpr int TOP = 8;  // number of values per block that top8 sends

// A byte holds `digits` codes with a stride of `code_bytes`, as the digits of a number.
template <Codec codec> constexpr int code_bytes = (BLOCK + Levels<codec>::digits - 1) / Levels<codec>::digits;
template <Codec codec> constexpr unsigned base = unsigned(2.0f * Levels<codec>::center) + 1u;
template <> constexpr unsigned base<Codec::int8> = 256u;
template <> constexpr unsigned base<Codec::int4> = 16u;
template <Codec codec> constexpr int padded_codes = code_bytes<codec> * Levels<codec>::digits;
template <Codec codec> constexpr int record_bytes = STEP_BYTES + code_bytes<codec>;
template <> constexpr int record_bytes<Codec::top8> = TOP * (STEP_BYTES + 1);

// ---------------------------------------------------------------- random numbers

PARTITA_INLINE std::uint32_t hash(std::uint32_t x) {
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    return x ^ (x >> 16);
}

// Hashes of the indices in a block. `fraction` combines them with the hash of the block's number.
PARTITA_INLINE void fill_places(std::uint32_t* out, std::uint32_t seed) {
    const std::uint32_t start = hash(seed + 1u);
    for (std::uint32_t i = 0; i < std::uint32_t(BLOCK); ++i) out[i] = hash(start + i);
}

PARTITA_INLINE std::uint32_t number_of_block(std::uint32_t seed, std::uint32_t block) {
    return hash(block + hash(seed ^ 0x9E3779B1u));
}

// A multiple of 2^-16 in [0, 1): an integer plus it rounds down to the integer.
PARTITA_INLINE float fraction(std::uint32_t place, std::uint32_t block) {
    const std::uint32_t word = (place ^ block) * 0x9E3779B1u;
    return float(std::int32_t(word >> 16)) * 0x1p-16f;
}

// ---------------------------------------------------------------- one block

// The sum of BLOCK numbers in a fixed order: sixteen lanes, then halves of them.
PARTITA_INLINE float sum_of(const float* __restrict in) {
    alignas(64) float lanes[16];
    for (int j = 0; j < 16; ++j) lanes[j] = in[j];
    for (int i = 16; i < BLOCK; i += 16)
        for (int j = 0; j < 16; ++j) lanes[j] = lanes[j] + in[i + j];
    for (int half = 8; half > 0; half /= 2)
        for (int j = 0; j < half; ++j) lanes[j] = lanes[j] + lanes[j + half];
    return lanes[0];
}

PARTITA_INLINE float magnitude(float x) { return float_of(bits_of(x) & ~SIGN); }

// Sums 2^-8 of each magnitude, so that the sum cannot overflow.
PARTITA_INLINE float mean_magnitude(const float* __restrict in) {
    alignas(64) float shares[BLOCK];
    for (int i = 0; i < BLOCK; ++i) shares[i] = magnitude(in[i]) * 0x1p-8f;
    return sum_of(shares);
}

// The factor by which the mean grows without the zeros at the end, which are the padding of a parameter's last block.
template <Codec codec>
PARTITA_INLINE float without_filling(const float* __restrict in) {
    if constexpr (codec != Codec::two_bits) return 1.0f;
    int count = BLOCK;
    while (count > 1 && (bits_of(in[count - 1]) & ~SIGN) == 0u) --count;
    return float(BLOCK) / float(count);
}

template <Codec codec>
PARTITA_INLINE void pack(std::uint8_t* __restrict out, const std::uint8_t* __restrict codes) {
    constexpr int n = code_bytes<codec>;
    for (int j = 0; j < n; ++j) {
        unsigned byte = 0;
        for (int digit = Levels<codec>::digits - 1; digit >= 0; --digit) byte = byte * base<codec> + codes[j + digit * n];
        out[j] = std::uint8_t(byte);
    }
}

template <Codec codec>
PARTITA_INLINE void unpack(std::uint8_t* __restrict codes, const std::uint8_t* __restrict in) {
    constexpr int n = code_bytes<codec>;
    for (int j = 0; j < n; ++j) {
        std::uint16_t rest = in[j];
        for (int digit = 0; digit < Levels<codec>::digits; ++digit) {
            codes[j + digit * n] = std::uint8_t(rest % base<codec>);
            rest = std::uint16_t(rest / base<codec>);
        }
    }
}

// The step of codes that were rounded to nearest: `width`, or for ternary codes the mean of the nonzero magnitudes.
template <Codec codec>
PARTITA_INLINE float best_step(const float* __restrict in, const std::uint8_t* __restrict codes, float width) {
    if constexpr (codec != Codec::ternary) return width;
    alignas(64) float shares[BLOCK];
    std::int32_t count = 0;
    for (int i = 0; i < BLOCK; ++i) {
        shares[i] = codes[i] != 1 ? magnitude(in[i]) * 0x1p-8f : 0.0f;
        count += codes[i] != 1;
    }
    return sum_of(shares) / float(count < 1 ? 1 : count) * 256.0f;
}

// `places` is null if codes are rounded to nearest.
template <Codec codec>
PARTITA_INLINE void encode_levels(std::uint8_t* __restrict out, const float* __restrict in,
                                  const std::uint32_t* __restrict places, std::uint32_t block) {
    constexpr float center = Levels<codec>::center, last = 2.0f * center + 0.5f;
    std::int32_t largest_bits = 0;
    for (int i = 0; i < BLOCK; ++i) {
        const std::int32_t bits = std::int32_t(bits_of(in[i]) & ~SIGN);
        largest_bits = bits > largest_bits ? bits : largest_bits;
    }
    const float largest = float_of(std::uint32_t(largest_bits));
    if (largest_bits == 0 || std::uint32_t(largest_bits) >= INFINITE) {  // only zeros, or a non-finite value
        const std::uint32_t step = largest_bits == 0 ? 0u : 0x7FC00000u;
        std::memcpy(out, &step, STEP_BYTES);
        std::memset(out + STEP_BYTES, 0, std::size_t(code_bytes<codec>));
        return;
    }
    const bool cuts = Levels<codec>::width != 0.0f && !places;
    const float scale =
        scale_of(cuts ? mean_magnitude(in) * Levels<codec>::width * without_filling<codec>(in) : largest);
    const float inverse = (cuts ? 1.0f : center) / scale;
    alignas(64) std::int32_t wide[BLOCK];
    alignas(64) std::uint8_t codes[padded_codes<codec>];
    for (int i = BLOCK; i < padded_codes<codec>; ++i) codes[i] = 0;
    if (places) {
        for (int i = 0; i < BLOCK; ++i) {
            const float u = (in[i] * inverse + center) + fraction(places[i], block);
            wide[i] = std::int32_t(u > last ? last : u);
        }
    } else {
        for (int i = 0; i < BLOCK; ++i) {
            const float u = (in[i] * inverse + center) + 0.5f;
            const float low = u > last ? last : u;
            wide[i] = std::int32_t(low < 0.0f ? 0.0f : low);
        }
    }
    narrow<true>(codes, wide, BLOCK);
    const float step = cuts ? best_step<codec>(in, codes, scale) : scale / center;
    std::memcpy(out, &step, STEP_BYTES);
    pack<codec>(out + STEP_BYTES, codes);
}

template <Codec codec>
PARTITA_INLINE void decode_levels(float* __restrict out, const std::uint8_t* __restrict in) {
    float step;
    std::memcpy(&step, in, STEP_BYTES);
    alignas(64) std::uint8_t codes[padded_codes<codec>];
    unpack<codec>(codes, in + STEP_BYTES);
    for (int i = 0; i < BLOCK; ++i) out[i] = (float(std::int32_t(codes[i])) - Levels<codec>::center) * step;
}

// The TOP largest magnitudes (the first of equal ones): their values in the order of their indices, then the indices.
PARTITA_INLINE void encode_top(std::uint8_t* __restrict out, const float* __restrict in) {
    std::int32_t bits[BLOCK];
    for (int i = 0; i < BLOCK; ++i) bits[i] = std::int32_t(bits_of(in[i]) & ~SIGN);
    std::int32_t least = 0;  // at least TOP magnitudes reach it and at most TOP exceed it; found bit by bit
    for (int bit = 30; bit >= 0; --bit) {
        const std::int32_t wanted = least | (std::int32_t(1) << bit);
        std::int32_t count = 0;
        for (int i = 0; i < BLOCK; ++i) count += bits[i] >= wanted;
        if (count >= TOP) least = wanted;
        if (count == TOP) break;
    }
    int above = 0, taken = 0;
    for (int i = 0; i < BLOCK; ++i) above += bits[i] > least;
    int equal = TOP - above;  // number of values equal to `least` that are chosen
    for (int i = 0; i < BLOCK && taken < TOP; ++i) {
        const bool chosen = bits[i] > least || (bits[i] == least && equal-- > 0);
        if (!chosen) continue;
        std::memcpy(out + taken * 4, in + i, 4);
        out[TOP * 4 + taken] = std::uint8_t(i);
        taken += 1;
    }
}

PARTITA_INLINE void decode_top(float* __restrict out, const std::uint8_t* __restrict in) {
    for (int i = 0; i < BLOCK; ++i) out[i] = 0.0f;
    for (int i = 0; i < TOP; ++i) std::memcpy(out + in[TOP * 4 + i], in + i * 4, 4);
}

// ---------------------------------------------------------------- a buffer

template <Codec codec>
PARTITA_INLINE void encode_block(std::uint8_t* out, const float* in, const std::uint32_t* places, std::uint32_t block) {
    if constexpr (codec == Codec::top8)
        encode_top(out, in);
    else
        encode_levels<codec>(out, in, places, block);
}

template <Codec codec>
PARTITA_INLINE void decode_block(float* out, const std::uint8_t* in) {
    if constexpr (codec == Codec::top8)
        decode_top(out, in);
    else
        decode_levels<codec>(out, in);
}

// With `held`, the residual of error feedback: it is added to the values, and overwritten with the encoding error.
template <Codec codec>
static void encode_with(Launch launch, Values values, float* held, std::uint8_t* out, Rounding rounding) {
    alignas(64) std::uint32_t places[BLOCK];
    if (rounding.random) fill_places(places, rounding.seed);
    for_blocks(launch, [&](std::int64_t at, int, auto) {
        alignas(64) float given[BLOCK];
        alignas(64) float sent[BLOCK];
        const std::int64_t number = at / BLOCK;
        std::uint8_t* record = out + number * record_bytes<codec>;
        load<true>(given, values.data, values.dtype, at, BLOCK);
        if (held)
            for (int i = 0; i < BLOCK; ++i) given[i] = given[i] + held[at + i];
        const std::uint32_t block = number_of_block(rounding.seed, rounding.first_block + std::uint32_t(number));
        encode_block<codec>(record, given, rounding.random ? places : nullptr, block);
        if (held) {
            decode_block<codec>(sent, record);
            for (int i = 0; i < BLOCK; ++i) held[at + i] = given[i] - sent[i];
        }
        return true;
    });
}

template <Codec codec>
static void decode_with(Launch launch, const std::uint8_t* in, void* out, Dtype dtype, bool adds) {
    for_blocks(launch, [&](std::int64_t at, int, auto) {
        alignas(64) float values[BLOCK];
        decode_block<codec>(values, in + at / BLOCK * record_bytes<codec>);
        if (dtype == Dtype::fp32) {
            float* __restrict to = static_cast<float*>(out) + at;
            if (adds)
                for (int i = 0; i < BLOCK; ++i) to[i] = to[i] + values[i];
            else
                for (int i = 0; i < BLOCK; ++i) to[i] = values[i];
        } else {
            encode_param<true>(static_cast<std::uint16_t*>(out) + at, values, dtype, BLOCK);
        }
        return true;
    });
}

static void encode(Launch launch, Codec codec, Values values, float* held, std::uint8_t* out, Rounding rounding) {
    switch (codec) {
        case Codec::int8: return encode_with<Codec::int8>(launch, values, held, out, rounding);
        case Codec::int4: return encode_with<Codec::int4>(launch, values, held, out, rounding);
        case Codec::two_bits: return encode_with<Codec::two_bits>(launch, values, held, out, rounding);
        case Codec::ternary: return encode_with<Codec::ternary>(launch, values, held, out, rounding);
        case Codec::sign: return encode_with<Codec::sign>(launch, values, held, out, rounding);
        case Codec::top8: return encode_with<Codec::top8>(launch, values, held, out, rounding);
    }
}

static void decode(Launch launch, Codec codec, const std::uint8_t* in, void* out, Dtype dtype, bool adds) {
    switch (codec) {
        case Codec::int8: return decode_with<Codec::int8>(launch, in, out, dtype, adds);
        case Codec::int4: return decode_with<Codec::int4>(launch, in, out, dtype, adds);
        case Codec::two_bits: return decode_with<Codec::two_bits>(launch, in, out, dtype, adds);
        case Codec::ternary: return decode_with<Codec::ternary>(launch, in, out, dtype, adds);
        case Codec::sign: return decode_with<Codec::sign>(launch, in, out, dtype, adds);
        case Codec::top8: return decode_with<Codec::top8>(launch, in, out, dtype, adds);
    }
}

}  // namespace PARTITA_LEVEL
}  // namespace partita
