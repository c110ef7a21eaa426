// A device type of PyTorch's (PrivateUse1, named "sim"): its tensors are apart from the host's, its streams and events
// are clocks, and its operators are the host's, run at once on memory that only they touch. See order.hpp.
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <chrono>

#include "order.hpp"

namespace simulated {
namespace {

constexpr auto SIM = c10::DeviceType::PrivateUse1;
c10::Device DEVICE(SIM, 0);  // this process's, of those of the machine
constexpr std::size_t ALIGNMENT = 512;

Order& order() {
    static auto* const only = new Order;  // tensors may outlive what is static
    return *only;
}

thread_local Stream current = 0;

// Called, with what it does, when a thread of the host waits for the device: "item", "copy_", or "synchronize".
pybind11::object& wait_hook() {
    static auto* const only = new pybind11::object;
    return *only;
}

void host_waits(const char* what) {
    if (!wait_hook()) return;
    const pybind11::gil_scoped_acquire holds_gil;
    if (!wait_hook().is_none()) wait_hook()(what);
}

bool is_on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == SIM; }

// ------------------------------------------------------------------------------------------------------------- memory

void must_fit(const void* at, std::size_t num_bytes) {
    const auto [held, peak, limit] = order().memory();
    TORCH_CHECK_WITH(OutOfMemoryError, order().allocate(at, num_bytes, current), "sim out of memory. Tried to allocate ",
                     num_bytes, " bytes; ", held, " of ", limit, " are in use");
}

void release(void* at) {
    order().free(at);
    std::free(at);
}

struct Memory final : c10::Allocator {
    c10::DataPtr allocate(std::size_t num_bytes) override {
        void* at = nullptr;
        if (num_bytes) {
            TORCH_CHECK(!posix_memalign(&at, ALIGNMENT, num_bytes), "the host has no memory for the simulated device");
            try {
                must_fit(at, num_bytes);
            } catch (...) {
                std::free(at);
                throw;
            }
        }
        return {at, at, [](void* context) { if (context) release(context); }, DEVICE};
    }
    c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
    void copy_data(void* to, const void* from, std::size_t num_bytes) const override { std::memcpy(to, from, num_bytes); }
};

Memory& memory() {
    static auto* const only = new Memory;
    return *only;
}

// Bytes from a tensor's first element to the end of its last.
std::size_t extent(const at::Tensor& tensor) {
    if (!tensor.numel()) return 0;
    std::size_t elements = 1;
    for (int dim = 0; dim < tensor.dim(); ++dim) elements += (tensor.size(dim) - 1) * tensor.stride(dim);
    return elements * tensor.element_size();
}

void touch(const at::Tensor& tensor, bool writes, const std::string& what) {
    order().access(tensor.data_ptr(), extent(tensor), writes, current, what);
}

// As CUDA does it: a failed call of the runtime leaves its error, which the next launch reports.
void launch(const std::string& what) {
    TORCH_CHECK(!order().take_error(), "sim error: pinning of host memory failed earlier; reported by ", what);
    order().launch(current, what);
}

// The memory of a device tensor as a host tensor, which keeps it.
at::Tensor host_view(const at::Tensor& tensor) {
    const auto options = at::TensorOptions().dtype(tensor.dtype()).device(c10::kCPU);
    return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [tensor](void*) {}, options);
}

// What an operator of the host has made becomes a tensor of the device, without a copy.
at::Tensor adopted(const at::Tensor& made) {
    const std::size_t num_bytes = made.storage().nbytes();
    void* at = made.storage().mutable_data();
    if (num_bytes) must_fit(at, num_bytes);
    const auto let_go = [](void* context) {
        auto* kept = static_cast<at::Tensor*>(context);
        order().free(kept->storage().data());
        delete kept;
    };
    c10::DataPtr pointer(at, new at::Tensor(made), let_go, DEVICE);
    c10::Storage storage(c10::Storage::use_byte_size_t{}, num_bytes, std::move(pointer), &memory(), true);
    auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                                           made.dtype());
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes(), made.strides(), made.storage_offset());
    return tensor;
}

// -------------------------------------------------------------------------------------------- streams, events, device

struct Event {
    Clock clock;
    std::chrono::steady_clock::time_point recorded;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
    static c10::Stream stream_of(Stream id) { return c10::Stream(c10::Stream::UNSAFE, DEVICE, id); }

    c10::DeviceType type() const override { return SIM; }
    c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
    c10::Device getDevice() const override { return DEVICE; }
    void setDevice(c10::Device) const override {}
    void uncheckedSetDevice(c10::Device) const noexcept override {}
    c10::DeviceIndex deviceCount() const noexcept override { return DEVICE.index() + 1; }

    c10::Stream getStream(c10::Device) const override { return stream_of(current); }
    c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
    c10::Stream getNewStream(c10::Device, int) const override { return stream_of(order().new_stream()); }
    c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream_of(order().new_stream()); }
    c10::Stream exchangeStream(c10::Stream stream) const override {
        return stream_of(std::exchange(current, Stream(stream.id())));
    }
    bool queryStream(const c10::Stream& stream) const override {
        order().host_waits_for_stream(stream.id());
        return true;
    }
    void synchronizeStream(const c10::Stream& stream) const override {
        host_waits("synchronize");
        order().host_waits_for_stream(stream.id());
    }
    void synchronizeDevice(c10::DeviceIndex) const override {
        host_waits("synchronize");
        order().host_waits_for_all();
    }

    void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
        if (!*event) *event = new Event;
        *static_cast<Event*>(*event) = {order().now(stream.id()), std::chrono::steady_clock::now()};
    }
    void block(void* event, const c10::Stream& stream) const override {
        if (event) order().wait(stream.id(), static_cast<Event*>(event)->clock);
    }
    bool queryEvent(void* event) const override {
        if (event) order().host_waits(static_cast<Event*>(event)->clock);
        return true;
    }
    void synchronizeEvent(void* event) const override {
        host_waits("synchronize");
        queryEvent(event);
    }
    // The host's time: operators run at once.
    double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
        const auto elapsed = static_cast<Event*>(to)->recorded - static_cast<Event*>(from)->recorded;
        return std::chrono::duration<double, std::milli>(elapsed).count();
    }
    void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
    void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
        order().record_stream(pointer.get(), stream.id());
    }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return DEVICE.index() + 1; }
    c10::DeviceIndex getCurrentDevice() const override { return DEVICE.index(); }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return DEVICE.index(); }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return DEVICE.index(); }
    void setCurrentDevice(c10::DeviceIndex) const override {}
    bool isPinnedPtr(const void* at) const override { return order().is_pinned(at); }
    void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t num_bytes) const override {
        auto fresh = memory().allocate(num_bytes);
        if (num_bytes && storage.nbytes()) std::memcpy(fresh.get(), storage.data(), std::min(num_bytes, storage.nbytes()));
        storage.set_data_ptr(std::move(fresh));
        storage.set_nbytes(num_bytes);
    }
};

// ------------------------------------------------------------------------------------------- any operator, on the host

// One call of an operator: its device tensors as host tensors, and the host's results as device tensors.
struct Call {
    const c10::FunctionSchema& schema;
    std::vector<at::Tensor> given, hosts;
    std::vector<bool> writes;

    std::string name() const { return schema.name(); }

    at::Tensor to_host(const at::Tensor& tensor, bool is_written) {
        if (!is_on_device(tensor)) {
            TORCH_CHECK(!tensor.defined() || tensor.dim() == 0 || tensor.is_meta(),
                        "Expected all tensors to be on the same device, but found at least two devices, ", DEVICE, " and ",
                        tensor.device(), "! (", name(), ")");
            return tensor;
        }
        const bool is_made = is_written && !tensor.storage().nbytes();
        given.push_back(tensor);
        hosts.push_back(is_made ? at::empty(tensor.sizes(), tensor.options().device(c10::kCPU)) : host_view(tensor));
        writes.push_back(is_written);
        return hosts.back();
    }

    c10::IValue to_host(const c10::IValue& value, bool is_written) {
        if (value.isTensor()) return to_host(value.toTensor(), is_written);
        if (value.isTensorList()) {
            c10::List<at::Tensor> list;
            for (const at::Tensor& each : value.toTensorVector()) list.push_back(to_host(each, is_written));
            return list;
        }
        if (value.isOptionalTensorList()) {
            c10::List<std::optional<at::Tensor>> list;
            for (const std::optional<at::Tensor>& each : value.toOptionalTensorVector())
                list.push_back(each ? std::optional(to_host(*each, is_written)) : each);
            return list;
        }
        return value.isDevice() ? c10::IValue(c10::Device(c10::kCPU)) : value;
    }

    at::Tensor to_device(const at::Tensor& result) {
        if (!result.defined()) return result;
        for (std::size_t place = 0; place < hosts.size(); ++place)
            if (result.is_same(hosts[place])) return written(given[place], result);
        for (const at::Tensor& tensor : given)
            if (const auto offset = place_in(tensor, result))
                return at::native::as_strided_tensorimpl(tensor, result.sizes(), result.strides(), *offset);
        auto tensor = adopted(result);
        touch(tensor, true, name());
        return tensor;
    }

    c10::IValue to_device(const c10::IValue& value) {
        if (value.isTensor()) return to_device(value.toTensor());
        if (!value.isTensorList()) return value;
        c10::List<at::Tensor> list;
        for (const at::Tensor& each : value.toTensorVector()) list.push_back(to_device(each));
        return list;
    }

    // A tensor that the operator was given to write, which may have got its size, and memory, from it.
    at::Tensor written(const at::Tensor& tensor, const at::Tensor& result) const {
        if (result.numel() && !tensor.storage().nbytes()) {
            tensor.resize_(result.sizes());
            host_view(tensor).copy_(result);
            touch(tensor, true, name());
        } else if (tensor.sizes() != result.sizes()) {
            tensor.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides());
        }
        return tensor;
    }

    // Where a result begins that is a view of a tensor, in elements.
    static std::optional<std::int64_t> place_in(const at::Tensor& tensor, const at::Tensor& result) {
        const Range whole = range_of(tensor.storage().data(), tensor.storage().nbytes());
        const auto at = reinterpret_cast<std::uintptr_t>(result.data_ptr());
        if (!result.numel() || at < whole.begin || at >= whole.end) return std::nullopt;
        return std::int64_t((at - whole.begin) / result.element_size());
    }
};

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    Call call{op.schema(), {}, {}, {}};
    const std::size_t num_arguments = call.schema.arguments().size();
    const auto arguments = torch::jit::pop(*stack, num_arguments);
    std::vector<c10::IValue> sent;
    for (std::size_t place = 0; place < num_arguments; ++place) {
        const auto* alias = call.schema.arguments()[place].alias_info();
        sent.push_back(call.to_host(arguments[place], alias && alias->isWrite()));
    }
    launch(call.name());
    for (std::size_t place = 0; place < call.given.size(); ++place)
        touch(call.given[place], call.writes[place], call.name());
    for (auto& value : sent) stack->push_back(std::move(value));
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    for (const auto& result : torch::jit::pop(*stack, call.schema.returns().size()))
        stack->push_back(call.to_device(result));
}

// ------------------------------------------------------------------------------------------- copies, and other kernels

// The memory of a tensor's elements, in their order.
std::vector<Range> pieces_of(const at::Tensor& tensor) {
    if (tensor.is_contiguous()) return {range_of(tensor.data_ptr(), tensor.nbytes())};
    std::vector<Range> pieces;
    for (std::int64_t number = 0; number < tensor.numel(); ++number) {
        std::int64_t rest = number, offset = 0;
        for (int dim = tensor.dim() - 1; dim >= 0; rest /= tensor.size(dim--))
            offset += rest % tensor.size(dim) * tensor.stride(dim);
        const char* base = static_cast<const char*>(tensor.data_ptr());
        pieces.push_back(range_of(base + offset * tensor.element_size(), tensor.element_size()));
    }
    return pieces;
}

std::vector<char> bytes_of(const at::Tensor& tensor) {
    const at::Tensor flat = tensor.contiguous();
    const char* begin = static_cast<const char*>(flat.data_ptr());
    return {begin, begin + flat.nbytes()};
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
    const bool to_host = !is_on_device(target), from_host = !is_on_device(source);
    launch(to_host ? "copy to host" : from_host ? "copy to device" : "copy");
    if (!from_host) touch(source, false, "copy_");
    if (!to_host) touch(target, true, "copy_");
    const at::Tensor read = from_host ? source : host_view(source), written = to_host ? target : host_view(target);
    if (!to_host && !from_host) {
        written.copy_(read);
        return target;
    }
    const at::Tensor& host = to_host ? target : source;
    const bool is_pinned = host.numel() && order().is_pinned(host.data_ptr());
    if (is_pinned) order().before_copy(pieces_of(host), to_host, current);
    // As CUDA does it: what is not pinned is read before the call returns, and written, too.
    if (!non_blocking || (to_host && !is_pinned)) {
        host_waits("copy_");
        order().host_waits_for_stream(current);
        written.copy_(read);
    } else if (to_host) {
        order().add_copy(true, pieces_of(target), bytes_of(read.to(target.scalar_type())), current);
    } else {
        written.copy_(read);
        if (is_pinned) order().add_copy(false, pieces_of(source), bytes_of(source), current);
    }
    return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
    target.resize_(source.sizes());
    return copy_from(source, target, false);
}

void foreach_copy(at::TensorList targets, at::TensorList sources, bool non_blocking) {
    for (std::size_t place = 0; place < targets.size(); ++place) targets[place].copy_(sources[place], non_blocking);
}

at::Scalar item(const at::Tensor& tensor) {
    launch("item");
    touch(tensor, false, "item");
    host_waits("item");
    order().host_waits_for_stream(current);
    return host_view(tensor).item();
}

void record_stream(at::Tensor& tensor, c10::Stream stream) { order().record_stream(tensor.storage().data(), stream.id()); }

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
                 std::optional<bool>, std::optional<at::MemoryFormat> format) {
    const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
    return at::detail::empty_generic(size, &memory(), keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
    const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
    return at::detail::empty_strided_generic(size, stride, &memory(), keys, c10::dtype_or_default(dtype));
}

at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage, std::int64_t offset, at::IntArrayRef size,
                        at::IntArrayRef stride) {
    return at::native::set_storage_cpu_(tensor, storage, offset, size, stride);
}

at::Tensor& set_whole_storage(at::Tensor& tensor, at::Storage storage) {
    return set_storage(tensor, storage, 0, {std::int64_t(storage.nbytes() / tensor.element_size())}, {1});
}

at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& other) {
    return set_storage(tensor, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", empty);
    m.impl("empty_strided", empty_strided);
    m.impl("as_strided", at::native::as_strided_tensorimpl);
    m.impl("view", at::native::view);
    m.impl("_reshape_alias", at::native::_reshape_alias);
    m.impl("resize_", at::native::resize_);
    m.impl("_copy_from", copy_from);
    m.impl("_copy_from_and_resize", copy_from_and_resize);
    m.impl("_foreach_copy_", foreach_copy);
    m.impl("_local_scalar_dense", item);
    m.impl("record_stream", record_stream);
    m.impl("set_.source_Storage_storage_offset", set_storage);
    m.impl("set_.source_Storage", set_whole_storage);
    m.impl("set_.source_Tensor", set_tensor);
    // Where the host has another kernel than devices that have none.
    m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

// Autocast of the products alone: those that CUDA computes in fp32 the CPU does not, with whose bits results are compared.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) { AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION) }

// What a collective does to memory, on the stream that is current.
void note_access(const std::vector<at::Tensor>& reads, const std::vector<at::Tensor>& writes, const std::string& what) {
    launch(what);
    for (const at::Tensor& tensor : reads) touch(tensor, false, what);
    for (const at::Tensor& tensor : writes) touch(tensor, true, what);
}

}  // namespace
}  // namespace simulated

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    using namespace simulated;
    static Hooks hooks;
    c10::SetAllocator(SIM, &memory());
    at::RegisterPrivateUse1HooksInterface(&hooks);
    at::globalContext().lazyInitDevice(SIM);
    m.def("use", [](c10::DeviceIndex index) { DEVICE.set_index(index); });
    m.def("races", [] { return order().races(); });
    m.def("forget_races", [] { order().forget_races(); });
    m.def("memory", [] { return order().memory(); });
    m.def("reset_peak", [] { order().reset_peak(); });
    m.def("set_limit", [](std::size_t num_bytes) { order().set_limit(num_bytes); });
    m.def("pin", [](std::uintptr_t at, std::size_t num_bytes) { return order().pin(reinterpret_cast<void*>(at), num_bytes); });
    m.def("set_pin_limit", [](std::size_t num_bytes) { order().set_pin_limit(num_bytes); });
    m.def("unpin", [](std::uintptr_t at) { order().unpin(reinterpret_cast<void*>(at)); });
    m.def("enter_thread", [](Stream number) { Order::enter_thread(number); });
    m.def("host_clock", [] { return order().host_clock(); });
    m.def("host_learns", [](const Clock& clock) { order().host_waits(clock); });
    m.def("trace", [](bool traces) { order().trace(traces); });
    m.def("launches", [] { return order().launches(); });
    m.def("mark", [](const std::string& what) { order().mark(what); });
    m.def("call_at_waits", [](pybind11::object hook) { wait_hook() = std::move(hook); });
    m.def("access", &note_access);
    m.def("host_view", &host_view);
}
