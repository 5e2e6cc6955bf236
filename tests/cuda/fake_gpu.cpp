// Lets FakeTensors be on cuda, and autograd run on them, in a build of torch for the CPU. No kernel is ever called.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
using c10::Device, c10::DeviceIndex, c10::Stream;
constexpr auto CUDA = c10::DeviceType::CUDA;
constexpr DeviceIndex COUNT = 2;
thread_local DeviceIndex current = 0;

struct Guard final : c10::impl::NoOpDeviceGuardImpl<CUDA> {
  DeviceIndex deviceCount() const noexcept override { return COUNT; }
  Device getDevice() const override { return Device(CUDA, current); }
  Device exchangeDevice(Device device) const override {
    Device before(CUDA, current);
    current = device.index();
    return before;
  }
  void setDevice(Device device) const override { current = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { current = device.index(); }
  Stream getStream(Device device) const noexcept override { return Stream(Stream::DEFAULT, device); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override { *event = this_event; }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
  void* this_event = const_cast<DeviceIndex*>(&COUNT);
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return COUNT; }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex current_device() const override { return current; }
};

Guard guard;
const bool is_registered = [] {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(CUDA)].store(&guard);
  return true;
}();
}  // namespace

using CUDAHooks = Hooks;
namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks)
}
