// Memory pool of large CPU tensors: one region of addresses that grows at its end, and freed blocks that are used again.
//
// glibc's heap mixes large tensors with small objects, which keep the holes between them from joining; after some steps a third of it
// is holes. Here a block has only tensors as neighbours, and a freed one joins those beside it at once. Best fit: the smallest free block
// that is large enough, the highest address of equal ones (Wilson et al., "Dynamic Storage Allocation", 1995, section 3).

#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <new>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace {

constexpr size_t kAlignment = 64;          // bytes: of c10's allocator, and a cache line
constexpr size_t kHugePage = size_t(1) << 21;  // the region grows by multiples of it
constexpr size_t kSmallestRegion = size_t(1) << 30;

constexpr size_t kUncheckedGrowth = size_t(1) << 26;  // bytes that the region grows before the free memory is read again
constexpr size_t kUnlimited = SIZE_MAX / 4;             // two of them can be added

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

size_t difference(size_t one, size_t other) { return one > other ? one - other : 0; }

// Return the number after `name` in a file, or its first one if `name` is empty; `otherwise` if there is none, or "max".
size_t read_number(const std::string& path, const std::string& name, size_t otherwise) {
  std::ifstream file(path);
  std::string word, value;
  while (name.empty() ? bool(file >> value) : bool(file >> word >> value)) {
    if (word == name) return value[0] >= '0' && value[0] <= '9' ? std::min<size_t>(std::strtoull(value.c_str(), nullptr, 10), kUnlimited) : otherwise;
    if (!name.empty()) std::getline(file, word);  // the unit
  }
  return otherwise;
}

// What can set a limit on memory: the machine, and the control groups of this process, of version 1 or 2.
struct Memory {
  std::string meminfo;               // /proc/meminfo
  std::vector<std::string> cgroups;  // folders

  Memory() = default;
  Memory(const char* meminfo, const char* cgroups) : meminfo(meminfo) {
    std::istringstream folders(cgroups);
    for (std::string folder; std::getline(folders, folder);) this->cgroups.push_back(folder);
  }

  // Return how much memory the process can still get, with what the system would write to swap or drop from its caches of files.
  // `pool`: bytes of the pool. It stays below all memory even if little of it was written to yet.
  size_t available(size_t pool) const {
    const size_t free_swap = 1024 * read_number(meminfo, "SwapFree:", 0);
    const size_t total = 1024 * (read_number(meminfo, "MemTotal:", kUnlimited / 1024) + read_number(meminfo, "SwapTotal:", 0));
    size_t least = std::min(1024 * read_number(meminfo, "MemAvailable:", kUnlimited / 1024) + free_swap, difference(total, pool));
    for (const std::string& folder : cgroups) {
      const bool is_v2 = std::ifstream(folder + "/memory.max").good();
      const size_t limit = read_number(folder + (is_v2 ? "/memory.max" : "/memory.limit_in_bytes"), "", kUnlimited);
      if (limit == kUnlimited) continue;
      const std::string stat = folder + "/memory.stat", total_of = is_v2 ? "" : "total_";  // of version 1: with the groups inside
      const size_t files = read_number(stat, total_of + "inactive_file", 0) + read_number(stat, total_of + "active_file", 0);
      const size_t memory = difference(limit + files, read_number(folder + (is_v2 ? "/memory.current" : "/memory.usage_in_bytes"), "", 0));
      if (is_v2) {
        const size_t swap = difference(read_number(folder + "/memory.swap.max", "", kUnlimited), read_number(folder + "/memory.swap.current", "", 0));
        least = std::min(least, memory + std::min(free_swap, swap));
      } else {
        const size_t both = read_number(folder + "/memory.memsw.limit_in_bytes", "", kUnlimited);
        const size_t used = read_number(folder + "/memory.memsw.usage_in_bytes", "", 0);
        least = std::min({least, memory + free_swap, difference(both + files, used)});
      }
    }
    return least;
  }
};

class Pool {
 public:
  Memory memory;

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

  // Return a block of at least `bytes`; nullptr if the region has no more. Throws where the memory that is available is smaller.
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
    check_memory(more);
    void* address = reinterpret_cast<void*>(end_);
    if (mprotect(address, more, PROT_READ | PROT_WRITE) != 0) return false;
    madvise(address, more, MADV_HUGEPAGE);  // advice: a kernel without huge pages ignores it
    const size_t total = end_ - start + more;
    if (joins) remove_free(std::prev(blocks_.end()));
    end_ += more;
    add_free(blocks_.end(), start, total);
    return true;
  }

  // The region is reserved without memory, so the kernel accepts any growth, and ends the process when the tensor is written to.
  void check_memory(size_t more) {
    if (unchecked_ + more < kUncheckedGrowth) {
      unchecked_ += more;
      return;
    }
    const size_t available = memory.available(end_ - begin_);
    TORCH_CHECK(more <= available, "DefaultCPUAllocator: can't allocate memory: the memory pool has ", end_ - begin_, " bytes and needs ", more,
                " more, available are ", available, " of memory and swap");
    unchecked_ = 0;
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
  size_t unchecked_ = 0;                          // bytes of growth since the memory was read
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
// `meminfo`: /proc/meminfo; `cgroups`: folders of the control groups of this process, one a line.
// Returns 0; 1 without free addresses. Call once in a process.
extern "C" int lm_runner_use_memory_pool(size_t region, size_t smallest, const char* meminfo, const char* cgroups) {
  pool().memory = Memory(meminfo, cgroups);
  if (!pool().reserve(region)) return 1;
  smallest_block = smallest;
  // A forked process must not find the lock held by a thread that it has not got.
  pthread_atfork([] { pool().mutex().lock(); }, [] { pool().mutex().unlock(); }, [] { pool().mutex().unlock(); });
  c10::SetCPUAllocator(new PoolAllocator, 1);
  return 0;
}

// Bytes that a process with a pool of `pool` bytes can still get.
extern "C" size_t lm_runner_available_memory(const char* meminfo, const char* cgroups, size_t pool) { return Memory(meminfo, cgroups).available(pool); }

// Bytes of the pool, used or free.
extern "C" size_t lm_runner_memory_pool_size() { return pool().size(); }
