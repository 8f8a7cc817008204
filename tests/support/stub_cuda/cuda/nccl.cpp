// NCCL for a group of one: what a rank sends to itself is copied in the stream. Larger groups are refused.
#include "half_types.h"
#include "state.h"

#include <nccl.h>

#include <cstring>

using namespace stub;

struct ncclComm {
    ncclResult_t state = ncclSuccess;
};

namespace {

struct Message {
    const void *from;
    void *to;
    size_t bytes;
    cudaStream_t stream;
};

// Sends and receives of the thread's open group, matched in their order when it is closed.
thread_local int open_groups = 0;
thread_local std::vector<Message> sends, receives;
thread_local std::string last_error;

ncclResult_t fail(ncclResult_t error, const char *why) {
    last_error = std::string("stub CUDA: ") + why;
    return error;
}

size_t bytes_of(size_t number, ncclDataType_t type) {
    switch (type) {
        case ncclInt8:
        case ncclUint8:
        case ncclFloat8e4m3:
        case ncclFloat8e5m2: return number;
        case ncclFloat16:
        case ncclBfloat16: return number * 2;
        case ncclInt64:
        case ncclUint64:
        case ncclFloat64: return number * 8;
        default: return number * 4;
    }
}

ncclResult_t collective(const char *name, const void *from, void *to, size_t number, ncclDataType_t type,
                        ncclComm_t comm, cudaStream_t stream) {
    Locked locked;
    if (comm->state != ncclSuccess) return fail(ncclInvalidUsage, "the communicator was aborted");
    size_t bytes = bytes_of(number, type);
    auto work = [=] { return from == to || !bytes ? cudaSuccess : copy(to, from, bytes); };
    bool refused = launch(stream_of(stream), std::string("nccl ") + name, work);
    return refused ? fail(ncclUnhandledCudaError, "the launch was refused") : ncclSuccess;
}

ncclResult_t join(ncclComm_t *comm, int ranks) {
    if (ranks != 1) return fail(ncclInvalidArgument, "NCCL is there for a group of one only");
    Locked locked;
    count("nccl communicator");
    *comm = new ncclComm;
    return ncclSuccess;
}

ncclResult_t exchange() {
    if (sends.size() != receives.size()) return fail(ncclInvalidUsage, "a group sends more or less than it receives");
    for (size_t at = 0; at < sends.size(); ++at) {
        const Message &sent = sends[at], &received = receives[at];
        if (sent.bytes != received.bytes) return fail(ncclInvalidUsage, "a receive has another size than its send");
        Locked locked;
        auto work = [=] { return sent.bytes ? copy(received.to, sent.from, sent.bytes) : cudaSuccess; };
        if (launch(stream_of(received.stream), "nccl SendRecv", work))
            return fail(ncclUnhandledCudaError, "the launch was refused");
    }
    return ncclSuccess;
}

ncclResult_t close_group() {
    if (open_groups) return ncclSuccess;
    ncclResult_t found = exchange();
    sends.clear();
    receives.clear();
    return found;
}

}  // namespace

// ------------------------------------------------------------------------------------------------------ communicators

EXPORT ncclResult_t ncclGetVersion(int *version) { return *version = NCCL_VERSION_CODE, ncclSuccess; }
EXPORT const char *ncclGetErrorString(ncclResult_t error) { return error ? "an error of the stub's NCCL" : "no error"; }
EXPORT const char *ncclGetLastError(ncclComm_t) { return last_error.c_str(); }
EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId *id) { return memset(id, 0, sizeof *id), ncclSuccess; }

EXPORT ncclResult_t ncclCommInitRank(ncclComm_t *comm, int ranks, ncclUniqueId, int) { return join(comm, ranks); }
EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int ranks, ncclUniqueId, int, ncclConfig_t *) {
    return join(comm, ranks);
}
EXPORT ncclResult_t ncclCommInitRankScalable(ncclComm_t *comm, int ranks, int, int, ncclUniqueId *, ncclConfig_t *) {
    return join(comm, ranks);
}
EXPORT ncclResult_t ncclCommInitAll(ncclComm_t *comms, int number, const int *) { return join(comms, number); }
EXPORT ncclResult_t ncclCommSplit(ncclComm_t, int color, int, ncclComm_t *comm, ncclConfig_t *) {
    if (color == NCCL_SPLIT_NOCOLOR) return *comm = nullptr, ncclSuccess;
    return join(comm, 1);
}
EXPORT ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
EXPORT ncclResult_t ncclCommDestroy(ncclComm_t comm) { return delete comm, ncclSuccess; }
EXPORT ncclResult_t ncclCommAbort(ncclComm_t comm) {  // kept: torch asks it for errors later
    return comm->state = ncclSystemError, ncclSuccess;
}
EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    return *error = comm->state, ncclSuccess;
}
EXPORT ncclResult_t ncclCommCount(const ncclComm_t, int *ranks) { return *ranks = 1, ncclSuccess; }
EXPORT ncclResult_t ncclCommUserRank(const ncclComm_t, int *rank) { return *rank = 0, ncclSuccess; }
EXPORT ncclResult_t ncclCommCuDevice(const ncclComm_t, int *device) { return *device = 0, ncclSuccess; }
EXPORT ncclResult_t ncclCommRegister(const ncclComm_t, void *, size_t, void **handle) {
    return *handle = nullptr, ncclSuccess;
}
EXPORT ncclResult_t ncclCommDeregister(const ncclComm_t, void *) { return ncclSuccess; }
EXPORT ncclResult_t ncclMemAlloc(void **start, size_t bytes) {
    return cudaMalloc(start, bytes) ? ncclUnhandledCudaError : ncclSuccess;
}
EXPORT ncclResult_t ncclMemFree(void *start) { return cudaFree(start) ? ncclUnhandledCudaError : ncclSuccess; }
EXPORT ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *, ncclDataType_t, ncclScalarResidence_t,
                                             ncclComm_t) {
    return *op = ncclSum, ncclSuccess;
}
EXPORT ncclResult_t ncclRedOpDestroy(ncclRedOp_t, ncclComm_t) { return ncclSuccess; }

// -------------------------------------------------------------------------------------------------------- collectives

EXPORT ncclResult_t ncclAllReduce(const void *from, void *to, size_t number, ncclDataType_t type, ncclRedOp_t,
                                  ncclComm_t comm, cudaStream_t stream) {
    return collective("AllReduce", from, to, number, type, comm, stream);
}
EXPORT ncclResult_t ncclReduce(const void *from, void *to, size_t number, ncclDataType_t type, ncclRedOp_t, int,
                               ncclComm_t comm, cudaStream_t stream) {
    return collective("Reduce", from, to, number, type, comm, stream);
}
EXPORT ncclResult_t ncclReduceScatter(const void *from, void *to, size_t number, ncclDataType_t type, ncclRedOp_t,
                                      ncclComm_t comm, cudaStream_t stream) {
    return collective("ReduceScatter", from, to, number, type, comm, stream);
}
EXPORT ncclResult_t ncclAllGather(const void *from, void *to, size_t number, ncclDataType_t type, ncclComm_t comm,
                                  cudaStream_t stream) {
    return collective("AllGather", from, to, number, type, comm, stream);
}
EXPORT ncclResult_t ncclAlltoAll(const void *from, void *to, size_t number, ncclDataType_t type, ncclComm_t comm,
                                 cudaStream_t stream) {
    return collective("AlltoAll", from, to, number, type, comm, stream);
}
EXPORT ncclResult_t ncclBroadcast(const void *from, void *to, size_t number, ncclDataType_t type, int, ncclComm_t comm,
                                  cudaStream_t stream) {
    return collective("Broadcast", from, to, number, type, comm, stream);
}
EXPORT ncclResult_t ncclBcast(void *buffer, size_t number, ncclDataType_t type, int root, ncclComm_t comm,
                              cudaStream_t stream) {
    return ncclBroadcast(buffer, buffer, number, type, root, comm, stream);
}

EXPORT ncclResult_t ncclSend(const void *from, size_t number, ncclDataType_t type, int, ncclComm_t,
                             cudaStream_t stream) {
    sends.push_back({from, nullptr, bytes_of(number, type), stream});
    return close_group();
}
EXPORT ncclResult_t ncclRecv(void *to, size_t number, ncclDataType_t type, int, ncclComm_t, cudaStream_t stream) {
    receives.push_back({nullptr, to, bytes_of(number, type), stream});
    return close_group();
}
EXPORT ncclResult_t ncclGroupStart() { return ++open_groups, ncclSuccess; }
EXPORT ncclResult_t ncclGroupEnd() { return --open_groups, close_group(); }
