// The update rules on a block of float32: loops that the compiler vectorizes.
#pragma once

#include "codec.hpp"

namespace partita {
namespace PARTITA_LEVEL {

// Moments of elements without gradients decay towards zero. Products with subnormal numbers take a hundred times as
// long, and rounding stops their decay, so they become zero.
PARTITA_INLINE float flush(float x) { return (bits_of(x) & ~SIGN) < 0x00800000u ? 0.0f : x; }

PARTITA_INLINE float next_first(const Adam& c, float m, float g) { return m * c.beta1 + g * c.one_minus_beta1; }
PARTITA_INLINE float next_second(const Adam& c, float v, float g) { return v * c.beta2 + g * g * c.one_minus_beta2; }

PARTITA_INLINE float denominator(const Adam& c, float v) { return __builtin_sqrtf(v) * c.inv_sqrt_bias2 + c.eps; }

PARTITA_INLINE float next_weight(const Adam& c, float p, float m, float denominator) {
    return p * c.keep - m * c.step_size / denominator;
}

template <bool full>
PARTITA_INLINE void add_decay(float* __restrict grad, float l2, const float* __restrict p, int n) {
    if (l2 == 0.0f) return;
    n = length<full>(n);
    for (int i = 0; i < n; ++i) grad[i] = grad[i] + l2 * p[i];
}

template <bool full>
PARTITA_INLINE void update(const Adam& rule, float* __restrict p, float* __restrict first, float* __restrict second,
                           float* __restrict grad, int n) {
    n = length<full>(n);
    const Adam c = rule;
    add_decay<full>(grad, c.l2, p, n);
    for (int i = 0; i < n; ++i) {
        const float m = flush(next_first(c, first[i], grad[i]));
        const float v = flush(next_second(c, second[i], grad[i]));
        p[i] = next_weight(c, p[i], m, denominator(c, v));
        first[i] = m;
        second[i] = v;
    }
}

// Updates a block with the 8-bit moments `first` and `second`. There are two passes, because the scales must be known
// before the first code. Roots overlap with the decoding and divisions with the encoding, so neither pass is limited by
// both.
template <bool full>
PARTITA_INLINE void update(const Adam& rule, const std::uint32_t* __restrict random, float* __restrict p,
                           std::int8_t* __restrict first, std::uint8_t* __restrict second, float& first_scale,
                           float& second_scale, float* __restrict grad, int n) {
    n = length<full>(n);
    const Adam c = rule;
    alignas(64) float m[BLOCK];
    alignas(64) float v[BLOCK];
    alignas(64) float divisor[BLOCK];
    alignas(64) std::int32_t first_codes[BLOCK];
    alignas(64) std::int32_t second_codes[BLOCK];
    add_decay<full>(grad, c.l2, p, n);
    // The decoded moments are only used multiplied by their betas.
    const float first_unit = first_scale * (1.0f / SIGNED_RANGE) * c.beta1;
    const float second_unit = second_scale * (1.0f / UNSIGNED_RANGE) * c.beta2;
    std::int32_t largest_first = 0, largest_second = 0;
    for (int i = 0; i < n; ++i) {
        const float g = grad[i];
        m[i] = decode_signed(first[i], first_unit) + g * c.one_minus_beta1;
        v[i] = decode_unsigned(second[i], second_unit) + g * g * c.one_minus_beta2;
        divisor[i] = denominator(c, v[i]);
        const std::int32_t magnitude = std::int32_t(bits_of(m[i]) & ~SIGN), square = std::int32_t(bits_of(v[i]));
        largest_first = magnitude > largest_first ? magnitude : largest_first;
        largest_second = square > largest_second ? square : largest_second;
    }
    first_scale = scale_of(float_of(std::uint32_t(largest_first)));
    second_scale = scale_of(float_of(std::uint32_t(largest_second)));
    const float first_inverse = SIGNED_RANGE / first_scale, second_inverse = UNSIGNED_RANGE / second_scale;
    for (int i = 0; i < n; ++i) {
        p[i] = next_weight(c, p[i], m[i], divisor[i]);
        const std::uint32_t mixed = mix(random[i], m[i], v[i]);
        first_codes[i] = encode_signed(m[i], first_inverse, dither_of_first(mixed));
        second_codes[i] = encode_unsigned(v[i], second_inverse, dither_of_second(mixed));
    }
    narrow<full>(first, first_codes, n);
    narrow<full>(second, second_codes, n);
}

template <bool full>
PARTITA_INLINE void update(const Sgd& rule, float* __restrict p, float* __restrict buffer, float* __restrict grad,
                           int n) {
    n = length<full>(n);
    const Sgd c = rule;
    add_decay<full>(grad, c.l2, p, n);
    if (!buffer) {
        for (int i = 0; i < n; ++i) p[i] = p[i] - c.lr * grad[i];
    } else {
        for (int i = 0; i < n; ++i) {
            const float m = flush(buffer[i] * c.momentum + grad[i]);
            p[i] = p[i] - c.lr * m;
            buffer[i] = m;
        }
    }
}

template <bool full>
PARTITA_INLINE void update(const Lion& rule, float* __restrict p, float* __restrict exp_avg,
                           const float* __restrict grad, int n) {
    n = length<full>(n);
    const Lion c = rule;
    for (int i = 0; i < n; ++i) {
        const float direction = exp_avg[i] * c.beta1 + grad[i] * c.one_minus_beta1;
        // lr with the sign of the direction; 0 for 0, and NaN for NaN.
        const float signed_lr = float_of(bits_of(c.lr) | (bits_of(direction) & SIGN));
        const float step = direction == 0.0f ? 0.0f : direction != direction ? direction : signed_lr;
        p[i] = p[i] * c.keep - step;
        exp_avg[i] = flush(exp_avg[i] * c.beta2 + grad[i] * c.one_minus_beta2);
    }
}

}  // namespace PARTITA_LEVEL
}  // namespace partita
