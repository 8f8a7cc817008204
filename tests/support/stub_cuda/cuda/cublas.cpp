// cuBLAS and cuBLASLt: handles have streams, and products are counted. What is not named here is the real library's,
// which finds no device.
#include "half_types.h"
#include "state.h"

#include <cublasLt.h>
#include <cublas_v2.h>

#include <cstring>
#include <map>

using namespace stub;

namespace {

std::map<const void *, cudaStream_t> &streams() {
    static auto *made = new std::map<const void *, cudaStream_t>;
    return *made;
}

cublasStatus_t product(cudaStream_t stream, const char *name) {
    bool refused = launch(stream_of(stream), std::string("cublas ") + name);
    return refused ? CUBLAS_STATUS_EXECUTION_FAILED : CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t product_of(cublasHandle_t handle, const char *name) {
    Locked locked;
    return product(streams()[handle], name);
}

// Something that a caller only hands back.
template <class Opaque>
cublasStatus_t make(Opaque *made) {
    *made = reinterpret_cast<Opaque>(new char[64]());
    return CUBLAS_STATUS_SUCCESS;
}
template <class Opaque>
cublasStatus_t drop(Opaque made) {
    delete[] reinterpret_cast<char *>(made);
    return CUBLAS_STATUS_SUCCESS;
}

}  // namespace

// ----------------------------------------------------------------------------------------------------------- products

// All take a handle first; what follows it is not looked at. The label gives the function its exported name, since the
// header declares that name with all arguments.
#define PRODUCT(name)                                                                 \
    EXPORT cublasStatus_t product_##name(cublasHandle_t handle) __asm__(#name);       \
    EXPORT cublasStatus_t product_##name(cublasHandle_t handle) { return product_of(handle, #name); }

PRODUCT(cublasGemmEx)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemmEx)
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasDgemmStridedBatched)
PRODUCT(cublasSgemv_v2)
PRODUCT(cublasDgemv_v2)
PRODUCT(cublasSdot_v2)
PRODUCT(cublasDdot_v2)
PRODUCT(cublasDotEx)

// ------------------------------------------------------------------------------------------------------------ handles

EXPORT cublasStatus_t cublasCreate_v2(cublasHandle_t *handle) {
    Locked locked;
    count(any_capture() ? "cublas create during a capture" : "cublas create");
    return make(handle);
}
EXPORT cublasStatus_t cublasDestroy_v2(cublasHandle_t handle) {
    Locked locked;
    streams().erase(handle);
    return drop(handle);
}
EXPORT cublasStatus_t cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
    Locked locked;
    streams()[handle] = stream;
    return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t, void *, size_t) { return CUBLAS_STATUS_SUCCESS; }
EXPORT cublasStatus_t cublasSetMathMode(cublasHandle_t, cublasMath_t) { return CUBLAS_STATUS_SUCCESS; }
EXPORT cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t, cublasPointerMode_t) { return CUBLAS_STATUS_SUCCESS; }
EXPORT cublasStatus_t cublasGetMathMode(cublasHandle_t, cublasMath_t *mode) {
    *mode = CUBLAS_DEFAULT_MATH;
    return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t, cublasPointerMode_t *mode) {
    *mode = CUBLAS_POINTER_MODE_HOST;
    return CUBLAS_STATUS_SUCCESS;
}

// ----------------------------------------------------------------------------------------------------------- cuBLASLt

EXPORT size_t cublasLtGetVersion() { return 130100; }
EXPORT cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle) { return make(handle); }
EXPORT cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) { return drop(handle); }

EXPORT cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t, const void *, const void *,
                                     cublasLtMatrixLayout_t, const void *, cublasLtMatrixLayout_t, const void *,
                                     const void *, cublasLtMatrixLayout_t, void *, cublasLtMatrixLayout_t,
                                     const cublasLtMatmulAlgo_t *, void *, size_t, cudaStream_t stream) {
    Locked locked;
    return product(stream, "cublasLtMatmul");
}

EXPORT cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                                     cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                                     cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int,
                                                     cublasLtMatmulHeuristicResult_t found[], int *number) {
    *found = {};
    *number = 1;
    return CUBLAS_STATUS_SUCCESS;
}

EXPORT cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *made, cublasComputeType_t, cudaDataType_t) {
    return make(made);
}
EXPORT cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t made) { return drop(made); }
EXPORT cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t, const void *,
                                                     size_t) {
    return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *made) { return make(made); }
EXPORT cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t made) { return drop(made); }
EXPORT cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t,
                                                           cublasLtMatmulPreferenceAttributes_t, const void *, size_t) {
    return CUBLAS_STATUS_SUCCESS;
}
EXPORT cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *made, cudaDataType, uint64_t, uint64_t,
                                                 int64_t) {
    return make(made);
}
EXPORT cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t made) { return drop(made); }
EXPORT cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t, cublasLtMatrixLayoutAttribute_t,
                                                       const void *, size_t) {
    return CUBLAS_STATUS_SUCCESS;
}
