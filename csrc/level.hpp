// All kernels for one instruction set: a source names it in PARTITA_LEVEL, includes this, and is compiled for it.
#pragma once

#include "chunks.hpp"
#include "rules.hpp"

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

// One block of any rule: weights and gradient to float32, `apply(p, grad)`, weights back.
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

// Adds the squares of a block to 16 sums; the order is the same for every length of vector.
constexpr int LANES = 16;

template <bool full>
PARTITA_INLINE void add_squares(double* __restrict sums, const float* __restrict in, int n) {
    n = length<full>(n);
    int i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int lane = 0; lane < LANES; ++lane) {
            const double x = in[i + lane];
            sums[lane] += x * x;
        }
    for (; i < n; ++i) {
        const double x = in[i];
        sums[i % LANES] += x * x;
    }
}

// The sum of squares of what `read(at, n, full, block)` puts into a block.
template <class Read>
PARTITA_INLINE double sum_of_squares(Launch launch, double* partial, const Read& read) {
    for_chunks(launch, SUM_BLOCK, [&](std::int64_t chunk) {
        alignas(64) float block[BLOCK];
        alignas(64) double sums[LANES] = {};
        const std::int64_t start = chunk * SUM_BLOCK;
        const std::int64_t stop = start + SUM_BLOCK < launch.n ? start + SUM_BLOCK : launch.n;
        for (std::int64_t at = start; at < stop; at += BLOCK) {
            const int n = stop - at < BLOCK ? int(stop - at) : BLOCK;
            if (n == BLOCK) {
                add_squares<true>(sums, read(at, n, std::true_type{}, block), n);
            } else {
                add_squares<false>(sums, read(at, n, std::false_type{}, block), n);
            }
        }
        double sum = 0.0;
        for (int lane = 0; lane < LANES; ++lane) sum += sums[lane];
        partial[chunk] = sum;
    });
    double total = 0.0;
    for (std::int64_t chunk = 0; chunk * SUM_BLOCK < launch.n; ++chunk) total += partial[chunk];
    return total;
}

static double square_sum(Launch launch, Input in, double* partial) {
    return sum_of_squares(launch, partial, [&](std::int64_t at, int n, auto full, float* block) -> const float* {
        if (in.dtype == Dtype::fp32) {
            prefetch<4 * BLOCK>(static_cast<const float*>(in.data) + at);
            return static_cast<const float*>(in.data) + at;
        }
        prefetch<2 * BLOCK>(static_cast<const std::uint16_t*>(in.data) + at);
        load<full.value>(block, in.data, in.dtype, at, n);
        return block;
    });
}

static double sum_and_square(Launch launch, void* out, Dtype dtype, const Input* inputs, int num_inputs,
                             double* partial) {
    return sum_of_squares(launch, partial, [&](std::int64_t at, int n, auto full, float* block) -> const float* {
        alignas(64) float next[BLOCK];
        load<full.value>(block, inputs[0].data, inputs[0].dtype, at, n);
        for (int input = 1; input < num_inputs; ++input) {
            load<full.value>(next, inputs[input].data, inputs[input].dtype, at, n);
            for (int i = 0; i < length<full.value>(n); ++i) block[i] += next[i];
        }
        store<full.value>(out, dtype, at, block, n);
        if (dtype != Dtype::fp32) load<full.value>(block, out, dtype, at, n);
        return block;
    });
}

// The traffic of an fp32 Adam with next to none of its arithmetic: what an in-place update cannot be faster than.
static void in_place(Launch launch, float* a, float* b, float* c, const float* g) {
    for_chunks(launch, BLOCK, [&](std::int64_t chunk) {
        const std::int64_t at = chunk * BLOCK;
        const int n = launch.n - at < BLOCK ? int(launch.n - at) : BLOCK;
        float* __restrict x = a + at;
        float* __restrict y = b + at;
        float* __restrict z = c + at;
        const float* __restrict w = g + at;
        prefetch<4 * BLOCK>(x);
        prefetch<4 * BLOCK>(y);
        prefetch<4 * BLOCK>(z);
        prefetch<4 * BLOCK>(w);
        for (int i = 0; i < n; ++i) {
            x[i] = x[i] * 0.5f + w[i];
            y[i] = y[i] * 0.5f + w[i];
            z[i] = z[i] * 0.5f + w[i];
        }
    });
}

extern const Kernels kernels;
const Kernels kernels = {adam, sgd, lion, square_sum, sum_and_square, in_place};

}  // namespace PARTITA_LEVEL
}  // namespace partita
