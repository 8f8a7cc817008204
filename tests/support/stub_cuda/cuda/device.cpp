// The device, which says it is an H100; and the driver API as Triton, and torch through its entry points, use it.
#include "state.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstring>

using namespace stub;

namespace {

constexpr int kVersion = 13000;
constexpr int kMultiprocessors = 132;
constexpr int kSharedPerBlock = 48 * 1024;
constexpr int kSharedPerBlockAtMost = 227 * 1024;
constexpr int kSharedPerMultiprocessor = 228 * 1024;
constexpr int kRegisters = 64 * 1024;
constexpr int kThreadsPerMultiprocessor = 2048;
constexpr int kCacheBytes = 50 << 20;
constexpr int kBusBits = 5120;

// The runtime's and the driver's attributes have the same numbers.
int attribute(int which) {
    switch (which) {
        case cudaDevAttrComputeCapabilityMajor: return 9;
        case cudaDevAttrComputeCapabilityMinor: return 0;
        case cudaDevAttrMultiProcessorCount: return kMultiprocessors;
        case cudaDevAttrWarpSize: return 32;
        case cudaDevAttrMaxThreadsPerBlock: return 1024;
        case cudaDevAttrMaxThreadsPerMultiProcessor: return kThreadsPerMultiprocessor;
        case cudaDevAttrMaxSharedMemoryPerBlock: return kSharedPerBlock;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: return kSharedPerBlockAtMost;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return kSharedPerMultiprocessor;
        case cudaDevAttrMaxRegistersPerBlock:
        case cudaDevAttrMaxRegistersPerMultiprocessor: return kRegisters;
        case cudaDevAttrL2CacheSize: return kCacheBytes;
        case cudaDevAttrClockRate: return 1'980'000;
        case cudaDevAttrMemoryClockRate: return 2'619'000;
        case cudaDevAttrGlobalMemoryBusWidth: return kBusBits;
        case cudaDevAttrMaxGridDimX: return 0x7fffffff;
        case cudaDevAttrMaxGridDimY:
        case cudaDevAttrMaxGridDimZ: return 65535;
        case cudaDevAttrMaxBlockDimX:
        case cudaDevAttrMaxBlockDimY: return 1024;
        case cudaDevAttrMaxBlockDimZ: return 64;
        case cudaDevAttrUnifiedAddressing:
        case cudaDevAttrConcurrentKernels:
        case cudaDevAttrCooperativeLaunch:
        case cudaDevAttrHostRegisterSupported:
        case cudaDevAttrMemoryPoolsSupported: return 1;
        default: return 0;
    }
}

struct Function {
    std::string name;
    std::vector<size_t> parameter_sizes;
};

CUresult as_driver(cudaError_t error) { return static_cast<CUresult>(error); }  // the same numbers, where it matters

}  // namespace

// ------------------------------------------------------------------------------------------- the runtime's questions

EXPORT cudaError_t cudaGetDeviceCount(int *number) { return *number = 1, cudaSuccess; }
EXPORT cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
EXPORT cudaError_t cudaSetDevice(int device) {
    return device ? refuse(cudaErrorInvalidDevice, "set device") : cudaSuccess;
}
EXPORT cudaError_t cudaDriverGetVersion(int *version) { return *version = kVersion, cudaSuccess; }
EXPORT cudaError_t cudaRuntimeGetVersion(int *version) { return *version = kVersion, cudaSuccess; }
EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) { return *can = 0, cudaSuccess; }
EXPORT cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return refuse(cudaErrorNotSupported, "peer access"); }
EXPORT cudaError_t cudaProfilerStart() { return cudaSuccess; }
EXPORT cudaError_t cudaProfilerStop() { return cudaSuccess; }

EXPORT cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr which, int) {
    return *value = attribute(which), cudaSuccess;
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char *text, int bytes, int) {
    return snprintf(text, static_cast<size_t>(bytes), "0000:01:00.0"), cudaSuccess;
}

EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp *found, int) {
    *found = {};
    strcpy(found->name, "NVIDIA H100 80GB HBM3 (stub)");
    found->totalGlobalMem = bytes_of_device();
    found->major = attribute(cudaDevAttrComputeCapabilityMajor);
    found->minor = attribute(cudaDevAttrComputeCapabilityMinor);
    found->multiProcessorCount = kMultiprocessors;
    found->warpSize = 32;
    found->maxThreadsPerBlock = 1024;
    found->maxThreadsPerMultiProcessor = kThreadsPerMultiprocessor;
    found->maxBlocksPerMultiProcessor = 32;
    found->sharedMemPerBlock = kSharedPerBlock;
    found->sharedMemPerBlockOptin = kSharedPerBlockAtMost;
    found->sharedMemPerMultiprocessor = kSharedPerMultiprocessor;
    found->regsPerBlock = found->regsPerMultiprocessor = kRegisters;
    found->l2CacheSize = kCacheBytes;
    found->memoryBusWidth = kBusBits;
    found->maxGridSize[0] = 0x7fffffff;
    found->maxGridSize[1] = found->maxGridSize[2] = 65535;
    found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024;
    found->maxThreadsDim[2] = 64;
    found->concurrentKernels = found->unifiedAddressing = 1;
    found->textureAlignment = 512;
    found->pciBusID = 1;
    return cudaSuccess;
}

// A driver function by its name, or by the name that a later version has; not found if the stub has none.
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned, unsigned long long,
                                                    cudaDriverEntryPointQueryResult *found) {
    *function = dlsym(RTLD_DEFAULT, name);
    if (!*function) *function = dlsym(RTLD_DEFAULT, (std::string(name) + "_v2").c_str());
    if (found) *found = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

// ---------------------------------------------------------------------------------------------- driver: the context

EXPORT CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
EXPORT CUresult cuDriverGetVersion(int *version) { return *version = kVersion, CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGet(CUdevice *device, int) { return *device = 0, CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetCount(int *number) { return *number = 1, CUDA_SUCCESS; }
EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice) {
    return *value = attribute(which), CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetCurrent(CUcontext *context) {
    return *context = reinterpret_cast<CUcontext>(1), CUDA_SUCCESS;
}
EXPORT CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice) { return cuCtxGetCurrent(context); }
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned *flags, int *active) {
    *flags = 0;
    return *active = 1, CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetLimit(size_t *value, CUlimit) { return *value = 1 << 20, CUDA_SUCCESS; }
EXPORT CUresult cuCtxSetLimit(CUlimit, size_t) { return CUDA_SUCCESS; }
EXPORT CUresult cuGetErrorString(CUresult error, const char **text) {
    return *text = cudaGetErrorString(static_cast<cudaError_t>(error)), CUDA_SUCCESS;
}
EXPORT CUresult cuGetErrorName(CUresult error, const char **text) {
    return *text = cudaGetErrorName(static_cast<cudaError_t>(error)), CUDA_SUCCESS;
}

// ------------------------------------------------------------------------------------- driver: modules and functions

EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    Locked locked;
    count(any_capture() ? "module load during a capture" : "module load");
    return *module = reinterpret_cast<CUmodule>(new ParameterSizes(parameter_sizes(image))), CUDA_SUCCESS;
}
EXPORT CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned, CUjit_option *, void **) {
    return cuModuleLoadData(module, image);
}
EXPORT CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }
EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    ParameterSizes &sizes = *reinterpret_cast<ParameterSizes *>(module);
    return *function = reinterpret_cast<CUfunction>(new Function{name, sizes[name]}), CUDA_SUCCESS;
}
EXPORT CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction) {
    *value = which == CU_FUNC_ATTRIBUTE_NUM_REGS              ? 64
             : which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
                                                                : 0;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return CUDA_SUCCESS; }
EXPORT CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return CUDA_SUCCESS; }
EXPORT CUresult cuOccupancyMaxActiveClusters(int *number, CUfunction, const CUlaunchConfig *) {
    return *number = 1, CUDA_SUCCESS;
}
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *number, CUfunction, int, size_t) {
    return *number = 1, CUDA_SUCCESS;
}

EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
    const CUlaunchConfig &c = *config;
    return cuLaunchKernel(function, c.gridDimX, c.gridDimY, c.gridDimZ, c.blockDimX, c.blockDimY, c.blockDimZ,
                          c.sharedMemBytes, c.hStream, parameters, extra);
}
EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                               unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **parameters,
                               void **) {
    Locked locked;
    const Function &found = *reinterpret_cast<Function *>(function);
    const auto number = reinterpret_cast<size_t>(stream);
    const Shape shape{grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, number};
    note_launch(found.name, shape, found.parameter_sizes, parameters);
    return as_driver(launch(stream_of(stream), "triton " + found.name));
}

// --------------------------------------------------------------------------------------------------- driver: pointers

// Triton asks for the device's address of what a caller hands to a kernel: pageable memory has none.
EXPORT CUresult cuPointerGetAttribute(void *value, CUpointer_attribute, CUdeviceptr pointer) {
    Locked locked;
    Place place = place_of(reinterpret_cast<void *>(pointer), 0);
    if (place != Place::Device && place != Place::Pinned)
        return as_driver(refuse(cudaErrorInvalidValue, "kernel argument that the device cannot read"));
    *static_cast<CUdeviceptr *>(value) = pointer;
    return CUDA_SUCCESS;
}

// Not the driver's layout: what the map is made of, one after the other.
EXPORT CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                       const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *block,
                                       const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                                       CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
    Locked locked;
    count("tensor map encode");
    *map = {};
    cuuint64_t *part = map->opaque;
    *part++ = reinterpret_cast<cuuint64_t>(address);
    *part++ = 0;  // Triton clears a bit here
    *part++ = type | swizzle << 8 | fill << 16;
    for (cuuint32_t side = 0; side < rank; side++) *part++ = sizes[side] << 16 | block[side];
    for (cuuint32_t side = 0; side + 1 < rank; side++) *part++ = strides[side];
    return CUDA_SUCCESS;
}
