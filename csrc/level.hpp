// All kernels for one instruction set: a source defines PARTITA_LEVEL, includes this file, and is compiled for it.
#pragma once

#include "chunks.hpp"
#include "rules.hpp"
#include "wire.hpp"

namespace partita {
namespace PARTITA_LEVEL {

template <bool full>
PARTITA_INLINE bool load_grad(float* __restrict out, const Grad& grad, std::int64_t at, int n) {
    n = length<full>(n);
    load<full>(out, grad.data, grad.dtype, at, n);
    std::uint32_t largest = 0;
    for (int i = 0; i < n; ++i) {
        out[i] = out[i] * grad.factor;
        const std::uint32_t magnitude = bits_of(out[i]) & ~SIGN;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest < INFINITE;
}

// Updates one block: converts weights and gradient to float32, calls `apply(p, grad)`, and stores the weights.
template <bool full, class Apply>
PARTITA_INLINE bool step_block(const Weights& w, const Grad& g, bool through, std::int64_t at, int n,
                               const Apply& apply) {
    alignas(64) float grad[BLOCK];
    alignas(64) float joined[BLOCK];
    alignas(64) std::uint16_t encoded[BLOCK];
    const bool finite = load_grad<full>(grad, g, at, n);
    float* p = w.low ? joined : w.master + at;
    if (w.low) join<full>(joined, w.param + at, w.low + at, n);
    apply(p, grad);
    if (w.low) {
        split<full>(w.param + at, w.low + at, joined, n);
    } else if (w.param && full && through) {
        encode_param<full>(encoded, p, w.param_dtype, n);
        write_through(w.param + at, encoded);
    } else if (w.param) {
        encode_param<full>(w.param + at, p, w.param_dtype, n);
    }
    return finite;
}

template <class Update>
PARTITA_INLINE bool step(Launch launch, Weights w, const float* state, Grad g, const Update& update_block) {
    const bool through = launch.n >= WRITE_THROUGH_FROM && aligned(w.param);
    return for_blocks(launch, [&](std::int64_t at, int n, auto full) {
        prefetch_weights(w, at);
        prefetch_grad(g, at);
        if (state) prefetch<4 * BLOCK>(state + at);
        return step_block<full.value>(w, g, through, at, n,
                                      [&](float* p, float* grad) { update_block(p, grad, at, n, full); });
    });
}

static bool adam_fp32(Launch launch, Weights w, Moments moments, Grad g, Adam rule) {
    float* first = static_cast<float*>(moments.first);
    float* second = static_cast<float*>(moments.second);
    return step(launch, w, first, g, [&](float* p, float* grad, std::int64_t at, int n, auto full) {
        prefetch<4 * BLOCK>(second + at);
        update<full.value>(rule, p, first + at, second + at, grad, n);
    });
}

static bool adam_8bit(Launch launch, Weights w, Moments moments, Grad g, Adam rule) {
    std::int8_t* first = static_cast<std::int8_t*>(moments.first);
    std::uint8_t* second = static_cast<std::uint8_t*>(moments.second);
    alignas(64) std::uint32_t random[BLOCK];
    fill_dither(random, rule.salt);
    return step(launch, w, nullptr, g, [&](float* p, float* grad, std::int64_t at, int n, auto full) {
        prefetch<BLOCK>(first + at);
        prefetch<BLOCK>(second + at);
        update<full.value>(rule, random, p, first + at, second + at, moments.first_scale[at / BLOCK],
                           moments.second_scale[at / BLOCK], grad, n);
    });
}

static bool adam(Launch launch, Weights w, Moments moments, Grad g, Adam rule) {
    return moments.first_scale ? adam_8bit(launch, w, moments, g, rule) : adam_fp32(launch, w, moments, g, rule);
}

static bool sgd(Launch launch, Weights w, float* buffer, Grad g, Sgd rule) {
    return step(launch, w, buffer, g, [&](float* p, float* grad, std::int64_t at, int n, auto full) {
        update<full.value>(rule, p, buffer ? buffer + at : nullptr, grad, n);
    });
}

static bool lion(Launch launch, Weights w, float* exp_avg, Grad g, Lion rule) {
    return step(launch, w, exp_avg, g, [&](float* p, float* grad, std::int64_t at, int n, auto full) {
        update<full.value>(rule, p, exp_avg + at, grad, n);
    });
}

extern const Kernels kernels;
const Kernels kernels = {adam, sgd, lion, encode, decode};

}  // namespace PARTITA_LEVEL
}  // namespace partita
