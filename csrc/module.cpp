// partita.kernels._native: calls the kernels of an instruction set with addresses and counts, which Python has checked.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "kernels.hpp"

namespace nb = nanobind;

namespace partita {
namespace {

using Address = std::uintptr_t;
// n, threads, level
using LaunchArgs = std::tuple<std::int64_t, int, int>;
// master, param, dtype of param, low
using WeightArgs = std::tuple<Address, Address, int, Address>;
// data, dtype, factor
using GradArgs = std::tuple<Address, int, float>;

// The instruction sets of this machine, from the narrowest to the widest.
std::vector<std::string> levels() {
    std::vector<std::string> names{"baseline"};
#ifdef PARTITA_X86
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
        names.push_back("avx2");
    if (names.size() == 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
        names.push_back("avx512");
#endif
    return names;
}

const Kernels& kernels_of(const LaunchArgs& args) {
#ifdef PARTITA_X86
    static const Kernels* const all[] = {&baseline::kernels, &avx2::kernels, &avx512::kernels};
#else
    static const Kernels* const all[] = {&baseline::kernels};
#endif
    return *all[std::get<2>(args)];
}

template <class T>
T* at(Address address) { return reinterpret_cast<T*>(address); }

Launch launch(const LaunchArgs& args) { return {std::get<0>(args), std::get<1>(args)}; }

Weights weights(const WeightArgs& args) {
    const auto& [master, param, dtype, low] = args;
    return {at<float>(master), at<std::uint16_t>(param), Dtype(dtype), at<std::int16_t>(low)};
}

Grad grad(const GradArgs& args) {
    const auto& [data, dtype, factor] = args;
    return {at<void>(data), Dtype(dtype), factor};
}

bool adam(const LaunchArgs& on, const WeightArgs& w, const std::tuple<Address, Address, Address, Address>& moments,
          const GradArgs& g, const std::vector<double>& rule, std::uint32_t salt) {
    const auto& [first, second, first_scale, second_scale] = moments;
    const Adam c{float(rule[0]), float(rule[1]), float(rule[2]), float(rule[3]), float(rule[4]),
                 float(rule[5]), float(rule[6]), float(rule[7]), float(rule[8]), salt};
    const Moments m{at<void>(first), at<void>(second), at<float>(first_scale), at<float>(second_scale)};
    return kernels_of(on).adam(launch(on), weights(w), m, grad(g), c);
}

bool sgd(const LaunchArgs& on, const WeightArgs& w, Address buffer, const GradArgs& g,
         const std::vector<double>& rule) {
    const Sgd c{float(rule[0]), float(rule[1]), float(rule[2])};
    return kernels_of(on).sgd(launch(on), weights(w), at<float>(buffer), grad(g), c);
}

bool lion(const LaunchArgs& on, const WeightArgs& w, Address exp_avg, const GradArgs& g,
          const std::vector<double>& rule) {
    const Lion c{float(rule[0]), float(rule[1]), float(rule[2]), float(rule[3]), float(rule[4]), float(rule[5])};
    return kernels_of(on).lion(launch(on), weights(w), at<float>(exp_avg), grad(g), c);
}

void encode(const LaunchArgs& on, int codec, const std::tuple<Address, int>& values, Address held, Address out,
            const std::tuple<bool, std::uint32_t, std::uint32_t>& rounding) {
    const auto& [data, dtype] = values;
    const auto& [random, seed, first_block] = rounding;
    kernels_of(on).encode(launch(on), Codec(codec), {at<void>(data), Dtype(dtype)}, at<float>(held),
                          at<std::uint8_t>(out), {random, seed, first_block});
}

void decode(const LaunchArgs& on, int codec, Address in, const std::tuple<Address, int>& out, bool adds) {
    const auto& [data, dtype] = out;
    kernels_of(on).decode(launch(on), Codec(codec), at<std::uint8_t>(in), at<void>(data), Dtype(dtype), adds);
}

}  // namespace
}  // namespace partita

NB_MODULE(_native, m) {
    using release = nb::call_guard<nb::gil_scoped_release>;
    m.attr("BLOCK") = partita::BLOCK;
    m.def("levels", &partita::levels);
    m.def("adam", &partita::adam, release());
    m.def("sgd", &partita::sgd, release());
    m.def("lion", &partita::lion, release());
    m.def("encode", &partita::encode, release());
    m.def("decode", &partita::decode, release());
}
