// Memory pool of large CPU tensors: one region of addresses that grows at its end, and freed blocks that are used again.
//
// glibc's heap mixes large tensors with small objects, which keep the holes between them from joining; after some steps a third of it
// is holes. Here a block has only tensors as neighbours, and a freed one joins those beside it at once. Best fit: the smallest free block
// that is large enough, the highest address of equal ones (Wilson et al., "Dynamic Storage Allocation", 1995, section 3).

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <pthread.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>
#include <new>
#include <set>
#include <utility>

namespace {

constexpr size_t kAlignment = 64;          // bytes: of c10's allocator, and a cache line
constexpr size_t kHugePage = size_t(1) << 21;  // the region grows by multiples of it
constexpr size_t kSmallestRegion = size_t(1) << 30;

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

class Pool {
 public:
  // Reserve up to `bytes` of addresses, which costs no memory. Returns whether there are any.
  bool reserve(size_t bytes) {
    for (; bytes >= kSmallestRegion; bytes /= 2) {
      void* start = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (start == MAP_FAILED) continue;
      begin_ = end_ = round_up(reinterpret_cast<uintptr_t>(start), kHugePage);
      limit_ = reinterpret_cast<uintptr_t>(start) + bytes;
      return true;
    }
    return false;
  }

  bool owns(const void* address) const {
    auto number = reinterpret_cast<uintptr_t>(address);
    return number >= begin_ && number < limit_;
  }

  // Return a block of at least `bytes`; nullptr if the region or the memory of the machine has no more.
  void* allocate(size_t bytes) {
    if (bytes > limit_ - begin_) return nullptr;
    const size_t size = round_up(bytes, kAlignment);
    std::lock_guard<std::mutex> guard(mutex_);
    auto fit = free_.lower_bound({size, 0});
    if (fit == free_.end()) {
      if (!grow(size)) return nullptr;
      fit = free_.lower_bound({size, 0});
    }
    const size_t available = fit->first;
    const uintptr_t address = ~fit->second;
    auto block = blocks_.find(address);
    if (available > size) {
      add_free(std::next(block), address + size, available - size);
      block->second.size = size;
    }
    free_.erase(fit);
    block->second.is_free = false;
    return reinterpret_cast<void*>(address);
  }

  void deallocate(void* pointer) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto block = blocks_.find(reinterpret_cast<uintptr_t>(pointer));
    if (block == blocks_.end() || block->second.is_free) {
      std::fputs("memory pool: freed what it has not allocated\n", stderr);
      std::abort();
    }
    uintptr_t address = block->first;
    size_t size = block->second.size;
    if (auto next = std::next(block); next != blocks_.end() && next->second.is_free) {
      size += next->second.size;
      remove_free(next);
    }
    if (block != blocks_.begin() && std::prev(block)->second.is_free) {
      auto before = std::prev(block);
      address = before->first;
      size += before->second.size;
      free_.erase({before->second.size, ~before->first});
      blocks_.erase(block);
      block = before;
    }
    block->second = {size, true};
    free_.insert({size, ~address});
  }

  size_t size() {
    std::lock_guard<std::mutex> guard(mutex_);
    return end_ - begin_;
  }

  std::mutex& mutex() { return mutex_; }

 private:
  struct Block {
    size_t size;
    bool is_free;
  };
  using Blocks = std::map<uintptr_t, Block>;

  // Make the free block at the end of the region at least `size` bytes long, or add one.
  bool grow(size_t size) {
    const bool joins = !blocks_.empty() && std::prev(blocks_.end())->second.is_free;
    const uintptr_t start = joins ? std::prev(blocks_.end())->first : end_;
    const size_t more = round_up(size - (end_ - start), kHugePage);
    if (more > limit_ - end_) return false;
    void* address = reinterpret_cast<void*>(end_);
    if (mprotect(address, more, PROT_READ | PROT_WRITE) != 0) return false;
    madvise(address, more, MADV_HUGEPAGE);  // advice: a kernel without huge pages ignores it
    const size_t total = end_ - start + more;
    if (joins) remove_free(std::prev(blocks_.end()));
    end_ += more;
    add_free(blocks_.end(), start, total);
    return true;
  }

  void add_free(Blocks::iterator hint, uintptr_t address, size_t size) {
    blocks_.emplace_hint(hint, address, Block{size, true});
    free_.insert({size, ~address});
  }

  void remove_free(Blocks::iterator block) {
    free_.erase({block->second.size, ~block->first});
    blocks_.erase(block);
  }

  std::mutex mutex_;
  uintptr_t begin_ = 0, end_ = 0, limit_ = 0;     // memory of [begin, end) can be used
  Blocks blocks_;                                 // address -> block; they fill [begin, end) without gaps
  std::set<std::pair<size_t, uintptr_t>> free_;   // size and inverted address of the free ones
};

Pool& pool() {
  static Pool* instance = new Pool;  // never destroyed: tensors are freed until the process has ended
  return *instance;
}

size_t smallest_block = 0;

void deallocate(void* pointer) {
  if (pointer == nullptr) return;
  c10::profiledCPUMemoryReporter().Delete(pointer);
  pool().owns(pointer) ? pool().deallocate(pointer) : c10::free_cpu(pointer);
}

struct PoolAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = bytes >= smallest_block ? pool().allocate(bytes) : nullptr;
    if (pointer == nullptr) pointer = c10::alloc_cpu(bytes);  // throws where there is no memory
    c10::profiledCPUMemoryReporter().New(pointer, bytes);
    return {pointer, pointer, &deallocate, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &deallocate; }

  void copy_data(void* target, const void* source, std::size_t bytes) const override { default_copy_data(target, source, bytes); }
};

}  // namespace

// Take CPU tensors of at least `smallest` bytes from a pool in a region of at most `region` bytes. Tensors that exist stay where they are.
// Returns 0; 1 without free addresses. Call once in a process.
extern "C" int lm_runner_use_memory_pool(size_t region, size_t smallest) {
  if (!pool().reserve(region)) return 1;
  smallest_block = smallest;
  // A forked process must not find the lock held by a thread that it has not got.
  pthread_atfork([] { pool().mutex().lock(); }, [] { pool().mutex().unlock(); }, [] { pool().mutex().unlock(); });
  c10::SetCPUAllocator(new PoolAllocator, 1);
  return 0;
}

// Bytes of the pool, used or free.
extern "C" size_t lm_runner_memory_pool_size() { return pool().size(); }
