// Iteration over a buffer in blocks: distribution to threads, and prefetching.
#pragma once

#include <omp.h>

#include <type_traits>

#include "codec.hpp"

namespace partita {
namespace PARTITA_LEVEL {

// Smaller buffers are written to the caches, where the next reader finds them.
constexpr std::int64_t WRITE_THROUGH_FROM = std::int64_t(1) << 20;

PARTITA_INLINE bool aligned(const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 64 == 0; }

constexpr int AHEAD = 2048;  // bytes

// Prefetches the lines of a later block: the hardware does not prefetch beyond a 4 KiB page.
template <int bytes>
PARTITA_INLINE void prefetch(const void* data) {
    const char* at = static_cast<const char*>(data) + AHEAD;
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 1, 3);
}

PARTITA_INLINE void prefetch_grad(const Grad& g, std::int64_t at) {
    if (g.dtype == Dtype::fp32)
        prefetch<4 * BLOCK>(static_cast<const float*>(g.data) + at);
    else
        prefetch<2 * BLOCK>(static_cast<const std::uint16_t*>(g.data) + at);
}

PARTITA_INLINE void prefetch_weights(const Weights& w, std::int64_t at) {
    if (w.low) {
        prefetch<2 * BLOCK>(w.param + at);
        prefetch<2 * BLOCK>(w.low + at);
    } else {
        prefetch<4 * BLOCK>(w.master + at);
    }
}

// Runs `block(at, length, full)` over the buffer, each thread on a contiguous range; true if all calls return true.
template <class Block>
PARTITA_INLINE bool for_blocks(Launch launch, const Block& block) {
    const std::int64_t whole = launch.n / BLOCK, blocks = (launch.n + BLOCK - 1) / BLOCK;
    int unfinished = 0;  // blocks with non-finite values
#pragma omp parallel num_threads(launch.threads) if (launch.threads > 1)
    {
        const std::int64_t team = omp_get_num_threads(), own = omp_get_thread_num();
        const std::int64_t stop = blocks * (own + 1) / team;
        for (std::int64_t number = blocks * own / team; number < stop; ++number) {
            const std::int64_t at = number * BLOCK;
            const bool finite = number < whole ? block(at, BLOCK, std::true_type{})
                                               : block(at, int(launch.n - at), std::false_type{});
            if (!finite) {
#pragma omp atomic
                unfinished += 1;
            }
        }
        fence();
    }
    return unfinished == 0;
}

}  // namespace PARTITA_LEVEL
}  // namespace partita
