// Launches: what is counted, kernels of the runtime API, and what the report says.
#include "state.h"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <unordered_map>
#include <utility>

using namespace stub;

namespace stub {
namespace {

std::map<std::string, long> &counts() {
    static auto *made = new std::map<std::string, long>;
    return *made;
}

// The name of every kernel in torch's libraries, by the address of the host function that stands for it.
std::unordered_map<const void *, const char *> &kernel_names() {
    static auto *made = new std::unordered_map<const void *, const char *>;
    return *made;
}

thread_local cudaError_t last_error = cudaSuccess;

}  // namespace

std::recursive_mutex &mutex() {
    static auto *made = new std::recursive_mutex;
    return *made;
}

long &launches_so_far() {
    static long number = 0;
    return number;
}

void count(const std::string &what, long by) { counts()[what] += by; }

cudaError_t refuse(cudaError_t error, const std::string &what) {
    last_error = error;
    std::string line = "refused " + std::to_string(error) + " " + what;
    count(line);
    if (getenv("STUB_CUDA_VERBOSE")) report(line);
    return error;
}

void report(const std::string &line) { fprintf(stderr, "stub CUDA: %s\n", line.c_str()); }

cudaError_t launch(Stream &stream, const std::string &what, std::function<cudaError_t()> work) {
    if (auto error = uses(stream, what)) return error;
    if (Capture *capture = capture_of(stream)) {
        if (capture->invalid) return refuse(cudaErrorStreamCaptureInvalidated, what);
        add_node(stream, what, std::move(work));
        return cudaSuccess;
    }
    count(what);
    ++launches_so_far();
    return work ? work() : cudaSuccess;
}

}  // namespace stub

namespace {

cudaError_t launch_kernel(const void *function, cudaStream_t stream) {
    Locked locked;
    auto found = kernel_names().find(function);
    std::string name = found == kernel_names().end() ? "?" : found->second;
    return launch(stream_of(stream), "kernel " + name);
}

bool empty(dim3 grid) { return !grid.x || !grid.y || !grid.z; }

}  // namespace

// ------------------------------------------------------------------------------------------------------ for the tests

// Lines `number TAB what`. Valid until this thread's next call.
EXPORT const char *stub_cuda_report() {
    Locked locked;
    static thread_local std::string text;
    text.clear();
    for (auto &[what, number] : counts()) text += std::to_string(number) + "\t" + what + "\n";
    text += std::to_string(bytes_in_use()) + "\tbytes in use\n";
    return text.c_str();
}

// ------------------------------------------------------------------------------------------------------------- errors

EXPORT cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
EXPORT cudaError_t cudaPeekAtLastError() { return last_error; }

EXPORT const char *cudaGetErrorName(cudaError_t error) {
    static thread_local char name[32];
    snprintf(name, sizeof name, "cudaError %d", error);
    return name;
}

EXPORT const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "no error";
        case cudaErrorInvalidValue: return "invalid argument";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorInvalidConfiguration: return "invalid configuration argument";
        case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
        case cudaErrorNotSupported: return "operation not supported";
        case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
        case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
        case cudaErrorStreamCaptureMerge: return "operation would result in a merge of separate capture sequences";
        case cudaErrorStreamCaptureUnmatched: return "capture was not ended in the same stream as it began";
        case cudaErrorStreamCaptureUnjoined: return "capturing stream has unjoined work";
        case cudaErrorStreamCaptureIsolation: return "dependency created on uncaptured work in another stream";
        case cudaErrorStreamCaptureImplicit:
            return "operation would make the legacy stream depend on a capturing blocking stream";
        case cudaErrorCapturedEvent: return "operation not permitted on an event last recorded in a capturing stream";
        case cudaErrorStreamCaptureWrongThread:
            return "attempt to terminate a thread-local capture sequence from another thread";
        default: return "an error that the stub has no text for";
    }
}

// ---------------------------------------------------------------------------------------- what nvcc's code registers

EXPORT void **__cudaRegisterFatBinary(void *) {
    static void *handle[4];
    return handle;
}
EXPORT void __cudaRegisterFatBinaryEnd(void **) {}
EXPORT void __cudaUnregisterFatBinary(void **) {}
EXPORT char __cudaInitModule(void **) { return 0; }
EXPORT void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}

EXPORT void __cudaRegisterFunction(void **, const char *host, char *, const char *name, int, void *, void *, void *,
                                   void *, int *) {
    Locked locked;
    kernel_names()[host] = name;
}

// -------------------------------------------------------------------------------------------- kernel<<<...>>>(...)

namespace {
struct Configuration {
    dim3 grid, block;
    size_t shared;
    cudaStream_t stream;
};
thread_local std::vector<Configuration> configurations;
}  // namespace

EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
    configurations.push_back({grid, block, shared, stream});
    return 0;
}

EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    Configuration last = configurations.back();
    configurations.pop_back();
    *grid = last.grid;
    *block = last.block;
    *shared = last.shared;
    *static_cast<cudaStream_t *>(stream) = last.stream;
    return cudaSuccess;
}

EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void *>(function));
    return cudaSuccess;
}

EXPORT cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3, void **, size_t, cudaStream_t stream) {
    if (empty(grid)) return refuse(cudaErrorInvalidConfiguration, "kernel with an empty grid");
    return launch_kernel(function, stream);
}

EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                                      cudaStream_t stream) {
    return cudaLaunchKernel(reinterpret_cast<const void *>(kernel), grid, block, arguments, shared, stream);
}

EXPORT cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **arguments,
                                               size_t shared, cudaStream_t stream) {
    return cudaLaunchKernel(function, grid, block, arguments, shared, stream);
}

EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **) {
    if (empty(config->gridDim)) return refuse(cudaErrorInvalidConfiguration, "kernel with an empty grid");
    return launch_kernel(function, config->stream);
}

// ------------------------------------------------------------------------------------------------ facts about kernels

EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *found, const void *) {
    *found = {};
    found->maxThreadsPerBlock = 1024;
    found->numRegs = 32;
    found->binaryVersion = found->ptxVersion = 90;
    found->maxDynamicSharedSizeBytes = 227 * 1024;
    return cudaSuccess;
}
EXPORT cudaError_t cudaFuncSetAttribute(const void *, cudaFuncAttribute, int) { return cudaSuccess; }

EXPORT cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
    Locked locked;
    static std::map<const void *, void *> addresses;
    void *&known = addresses[symbol];
    if (!known) known = allocate(Place::Device, 4096);
    *address = known;
    return cudaSuccess;
}

EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *, int, size_t,
                                                                          unsigned) {
    *blocks = 2;
    return cudaSuccess;
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads,
                                                                 size_t shared) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared, 0);
}
