// Memory: allocations at addresses that are never given out twice, so that freed memory is known as such; copies.
#include "state.h"

#include <sys/mman.h>

#include <cstring>
#include <map>

namespace stub {
namespace {

constexpr size_t kArenaBytes = size_t(32) << 40;   // of addresses, not of memory
constexpr size_t kDeviceBytes = size_t(80) << 30;  // of an H100
constexpr size_t kPage = 4096;
constexpr size_t kMostCopied = size_t(64) << 20;  // larger copies are checked and counted, but not done

struct Block {
    size_t bytes;
    Place place;
};

struct Arena {
    char *start = static_cast<char *>(
        mmap(nullptr, kArenaBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    char *next = start;
    size_t used = 0;
    std::map<const char *, Block> blocks;      // by their first byte
    std::map<const char *, Block> registered;  // the host's own memory, pinned by cudaHostRegister
};

Arena &arena() {
    static Arena *made = new Arena;  // never destroyed: libraries free at exit
    return *made;
}

const Block *block_of(const std::map<const char *, Block> &blocks, const char *start, size_t bytes) {
    auto after = blocks.upper_bound(start);
    if (after == blocks.begin()) return nullptr;
    auto &[first, block] = *--after;
    return start + bytes <= first + block.bytes ? &block : nullptr;
}

size_t whole_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

const char *letter(Place place) { return place == Place::Device ? "D" : "H"; }

std::string copy_name(void *to, const void *from, size_t bytes, bool &pageable) {
    Place source = place_of(from, bytes), target = place_of(to, bytes);
    pageable = source == Place::Pageable || target == Place::Pageable;
    return std::string("memcpy ") + letter(source) + "2" + letter(target) + (pageable ? " pageable" : "");
}

// A captured copy keeps its addresses. A launch of the graph is refused if their memory was freed meanwhile.
cudaError_t copy_of_graph(void *to, const void *from, size_t bytes) {
    for (const void *end : {static_cast<const void *>(to), from})
        if (place_of(end, bytes) == Place::Gone) {
            char line[160];
            snprintf(line, sizeof line, "a graph's memcpy node %s %zu bytes at %p, which were freed after the capture",
                     end == from ? "reads" : "writes", bytes, end);
            report(line);
            return refuse(cudaErrorIllegalAddress, "graph's memcpy of freed memory");
        }
    return copy(to, from, bytes);
}

cudaError_t launch_copy(void *to, const void *from, size_t bytes, Stream &stream) {
    if (!bytes) return cudaSuccess;
    bool pageable;
    std::string name = copy_name(to, from, bytes, pageable);
    if (Capture *capture = capture_of(stream)) {
        if (pageable) return invalidate(*capture, cudaErrorStreamCaptureUnsupported, name);
        if (place_of(to, bytes) == Place::Gone || place_of(from, bytes) == Place::Gone)
            return invalidate(*capture, cudaErrorInvalidValue, name + " of freed memory");
        return launch(stream, name, [=] { return copy_of_graph(to, from, bytes); });
    }
    return launch(stream, name, [=] { return copy(to, from, bytes); });
}

cudaError_t fill(void *start, int value, size_t bytes) {
    if (place_of(start, bytes) == Place::Gone) return refuse(cudaErrorIllegalAddress, "memset of freed memory");
    if (bytes <= kMostCopied) memset(start, value, bytes);
    return cudaSuccess;
}

}  // namespace

Place place_of(const void *start, size_t bytes) {
    auto *first = static_cast<const char *>(start);
    Arena &all = arena();
    if (first >= all.start && first < all.start + kArenaBytes) {
        const Block *block = block_of(all.blocks, first, bytes);
        return block ? block->place : Place::Gone;
    }
    return block_of(all.registered, first, bytes) ? Place::Pinned : Place::Pageable;
}

void *allocate(Place place, size_t bytes) {
    Arena &all = arena();
    size_t size = whole_pages(bytes ? bytes : 1);
    if (place == Place::Device && all.used + size > kDeviceBytes) return nullptr;
    if (all.next + size > all.start + kArenaBytes) return nullptr;
    char *start = all.next;
    all.next += size;
    if (mprotect(start, size, PROT_READ | PROT_WRITE)) return nullptr;
    all.blocks[start] = {size, place};
    if (place == Place::Device) all.used += size;
    return start;
}

bool release(void *start) {
    Arena &all = arena();
    auto found = all.blocks.find(static_cast<char *>(start));
    if (found == all.blocks.end()) return false;
    auto [bytes, place] = found->second;
    mmap(start, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    if (place == Place::Device) all.used -= bytes;
    all.blocks.erase(found);
    return true;
}

size_t bytes_in_use() { return arena().used; }
size_t bytes_of_device() { return kDeviceBytes; }

cudaError_t copy(void *to, const void *from, size_t bytes) {
    if (place_of(to, bytes) == Place::Gone || place_of(from, bytes) == Place::Gone)
        return refuse(cudaErrorInvalidValue, "memcpy of freed memory");
    if (bytes <= kMostCopied) memmove(to, from, bytes);
    return cudaSuccess;
}

}  // namespace stub

using namespace stub;

// -------------------------------------------------------------------------------------------------------- allocations

EXPORT cudaError_t cudaMalloc(void **start, size_t bytes) {
    Locked locked;
    if (auto error = unsafe("malloc device")) return error;
    *start = allocate(Place::Device, bytes);
    if (!*start) return refuse(cudaErrorMemoryAllocation, "malloc device");
    count("malloc device");
    return cudaSuccess;
}

EXPORT cudaError_t cudaFree(void *start) {
    Locked locked;
    if (!start) return cudaSuccess;
    if (auto error = unsafe("free device")) return error;
    if (!release(start)) return refuse(cudaErrorInvalidValue, "free device");
    count("free device");
    return cudaSuccess;
}

EXPORT cudaError_t cudaMallocAsync(void **start, size_t bytes, cudaStream_t) { return cudaMalloc(start, bytes); }
EXPORT cudaError_t cudaFreeAsync(void *start, cudaStream_t) { return cudaFree(start); }

EXPORT cudaError_t cudaHostAlloc(void **start, size_t bytes, unsigned) {
    Locked locked;
    if (auto error = unsafe("malloc pinned")) return error;
    *start = allocate(Place::Pinned, bytes);
    if (!*start) return refuse(cudaErrorMemoryAllocation, "malloc pinned");
    count("malloc pinned");
    return cudaSuccess;
}

EXPORT cudaError_t cudaFreeHost(void *start) {
    Locked locked;
    if (!start) return cudaSuccess;
    if (auto error = unsafe("free pinned")) return error;
    if (!release(start)) return refuse(cudaErrorInvalidValue, "free pinned");
    count("free pinned");
    return cudaSuccess;
}

EXPORT cudaError_t cudaHostRegister(void *start, size_t bytes, unsigned) {
    Locked locked;
    if (auto error = unsafe("register pinned")) return error;
    arena().registered[static_cast<char *>(start)] = {bytes, Place::Pinned};
    return cudaSuccess;
}

EXPORT cudaError_t cudaHostUnregister(void *start) {
    Locked locked;
    if (auto error = unsafe("unregister pinned")) return error;
    bool known = arena().registered.erase(static_cast<char *>(start));
    return known ? cudaSuccess : refuse(cudaErrorHostMemoryNotRegistered, "unregister pinned");
}

EXPORT cudaError_t cudaMemGetInfo(size_t *unused, size_t *total) {
    Locked locked;
    *total = kDeviceBytes;
    *unused = kDeviceBytes - bytes_in_use();
    return cudaSuccess;
}

EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *found, const void *start) {
    Locked locked;
    *found = {};
    Place place = place_of(start, 0);
    if (place == Place::Device || place == Place::Pinned) {
        found->type = place == Place::Device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
        found->devicePointer = const_cast<void *>(start);
        found->hostPointer = place == Place::Pinned ? found->devicePointer : nullptr;
    } else {
        found->type = cudaMemoryTypeUnregistered;
    }
    return cudaSuccess;
}

// --------------------------------------------------------------------------------------------------- copies, fillings

EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind) {
    Locked locked;
    if (auto error = unsafe("synchronous memcpy")) return error;
    count("wait memcpy");
    return launch_copy(to, from, bytes, legacy_stream());
}

EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
    Locked locked;
    return launch_copy(to, from, bytes, stream_of(stream));
}

EXPORT cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t bytes, cudaStream_t stream) {
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}

EXPORT cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                     size_t height, cudaMemcpyKind, cudaStream_t handle) {
    Locked locked;
    if (!width || !height) return cudaSuccess;
    bool pageable;
    Stream &stream = stream_of(handle);
    std::string name = copy_name(to, from, to_pitch * (height - 1) + width, pageable);
    Capture *capture = capture_of(stream);
    if (capture && pageable) return invalidate(*capture, cudaErrorStreamCaptureUnsupported, name);
    return launch(stream, name, [=] {
        for (size_t row = 0; row < height; ++row) {
            auto *target = static_cast<char *>(to) + row * to_pitch;
            if (auto error = copy_of_graph(target, static_cast<const char *>(from) + row * from_pitch, width))
                return error;
        }
        return cudaSuccess;
    });
}

EXPORT cudaError_t cudaMemsetAsync(void *start, int value, size_t bytes, cudaStream_t stream) {
    Locked locked;
    return launch(stream_of(stream), "memset", [=] { return fill(start, value, bytes); });
}

EXPORT cudaError_t cudaMemset(void *start, int value, size_t bytes) {
    Locked locked;
    if (auto error = unsafe("synchronous memset")) return error;
    return cudaMemsetAsync(start, value, bytes, nullptr);
}

EXPORT cudaError_t cudaMemcpyToSymbol(const void *, const void *, size_t, size_t, cudaMemcpyKind) {
    return cudaSuccess;  // only kernels read symbols
}

// ---------------------------------------------------------------------------------- pools of memory, memory of others

EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int) {
    *pool = reinterpret_cast<cudaMemPool_t>(1);
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void *value) {
    *static_cast<size_t *>(value) = 0;
    return cudaSuccess;
}
EXPORT cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void *) { return cudaSuccess; }
EXPORT cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc *, size_t) { return cudaSuccess; }
EXPORT cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }

EXPORT cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *, void *) { return refuse(cudaErrorNotSupported, "ipc"); }
EXPORT cudaError_t cudaIpcOpenMemHandle(void **, cudaIpcMemHandle_t, unsigned) {
    return refuse(cudaErrorNotSupported, "ipc");
}
EXPORT cudaError_t cudaIpcCloseMemHandle(void *) { return refuse(cudaErrorNotSupported, "ipc"); }
EXPORT cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *, cudaEvent_t) {
    return refuse(cudaErrorNotSupported, "ipc");
}
EXPORT cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *, cudaIpcEventHandle_t) {
    return refuse(cudaErrorNotSupported, "ipc");
}
