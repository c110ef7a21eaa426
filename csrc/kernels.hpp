// The kernels and their arguments. Every source of csrc/ includes only this file and level.hpp. It must not define
// functions, because it is compiled for several instruction sets.
//
// A buffer is flat and contiguous, `n` elements long. All arithmetic is IEEE float32, with one rounding per operation
// and no fused multiply-add, so results have the same bits on every instruction set. Threads process full blocks, so
// results are the same for any number of threads.
#pragma once

#include <cstdint>

namespace partita {

// Elements that share an int8 scale; shards start at multiples of it. partita.plan.span.QUANTUM has the same value.
constexpr int BLOCK = 256;

enum class Dtype : int { none = 0, fp32 = 1, bf16 = 2, fp16 = 3 };

struct Launch {
    std::int64_t n;
    int threads;
};

// Three forms of weights: only `master`; `master` and the 16-bit `param` rounded from it; `low` and the bf16 `param`,
// which together are the fp32 master. Missing pointers are null.
struct Weights {
    float* master;
    std::uint16_t* param;
    Dtype param_dtype;
    std::int16_t* low;
};

// Updates use the gradient `data[i] * factor`.
struct Grad {
    const void* data;
    Dtype dtype;
    float factor;
};

// Adam's moments: fp32, or 8-bit codes with the largest magnitude of each block.
struct Moments {
    void* first;
    void* second;
    float* first_scale;
    float* second_scale;
};

struct Adam {
    float beta1, one_minus_beta1;
    float beta2, one_minus_beta2;
    float step_size;          // lr / (1 - beta1^step)
    float inv_sqrt_bias2;     // 1 / sqrt(1 - beta2^step)
    float eps;
    float keep;               // 1 - lr * weight_decay if it is decoupled, else 1
    float l2;                 // weight_decay if it is not decoupled, else 0
    std::uint32_t salt;       // of the dither of 8-bit moments
};

struct Sgd {
    float lr, momentum, l2;
};

struct Lion {
    float lr;
    float beta1, one_minus_beta1;
    float beta2, one_minus_beta2;
    float keep;
};

// Encodings of a block of values for communication between ranks (wire.hpp).
enum class Codec : int { int8, int4, two_bits, ternary, sign, top8 };

struct Values {
    const void* data;
    Dtype dtype;
};

// Rounding to the nearest level, or (`random`) stochastically to one of the two adjacent levels, which is unbiased. The
// random numbers depend on the seed, the index in the block and the block's number, counted from `first_block`.
struct Rounding {
    bool random;
    std::uint32_t seed;
    std::uint32_t first_block;
};

// The kernels, compiled for one instruction set.
struct Kernels {
    bool (*adam)(Launch, Weights, Moments, Grad, Adam);
    bool (*sgd)(Launch, Weights, float* buffer, Grad, Sgd);
    bool (*lion)(Launch, Weights, float* exp_avg, Grad, Lion);
    void (*encode)(Launch, Codec, Values, float* held, std::uint8_t* out, Rounding);
    void (*decode)(Launch, Codec, const std::uint8_t* in, void* out, Dtype, bool adds);
};

namespace baseline { extern const Kernels kernels; }
namespace avx2 { extern const Kernels kernels; }
namespace avx512 { extern const Kernels kernels; }

}  // namespace partita
