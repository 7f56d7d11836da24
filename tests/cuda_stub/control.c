/* Devices, contexts, the table of symbols, and what tests steer: failures, counts, a trace. */
#define _GNU_SOURCE
#include "stub.h"
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t mutex;
static int initialized, integrated = 1, version = 13000;
static __thread void *current;
static int primary;
int context_references;
static long calls, fail_in;
static CUresult fail_with;
static char fail_prefix[64];
static char *trace;
static size_t traced;

__attribute__((constructor)) static void start(void) {
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&mutex, &attributes);
}
void lock(void) { pthread_mutex_lock(&mutex); }
void unlock(void) { pthread_mutex_unlock(&mutex); }
CUresult current_context(void) {
    if (!initialized) return NOT_INITIALIZED;
    return current && context_references ? OK : INVALID_CONTEXT;
}

CUresult enter(const char *name, const char *format, ...) {
    calls++;
    if (trace) {
        char line[256];
        int at = snprintf(line, sizeof line, "%s ", name);
        va_list arguments;
        va_start(arguments, format);
        at += vsnprintf(line + at, sizeof line - at, format, arguments);
        va_end(arguments);
        trace = realloc(trace, traced + at + 2);
        memcpy(trace + traced, line, at);
        traced += at;
        trace[traced++] = '\n';
        trace[traced] = 0;
    }
    if (fail_in && !strncmp(name, fail_prefix, strlen(fail_prefix)) && !--fail_in) return fail_with;
    return OK;
}

static CUresult init(unsigned flags) {
    ENTRY("cuInit", 0, "%u", flags);
    initialized = 1;
    LEAVE(OK);
}
static CUresult driverGetVersion(int *out) {
    *out = version;
    return OK;
}
static CUresult deviceGet(int *device, int ordinal) {
    ENTRY("cuDeviceGet", 0, "%d", ordinal);
    *device = 0;
    LEAVE(!initialized ? NOT_INITIALIZED : ordinal ? INVALID_DEVICE : OK);
}
static CUresult deviceGetCount(int *count) {
    ENTRY("cuDeviceGetCount", 0, "");
    *count = 1;
    LEAVE(initialized ? OK : NOT_INITIALIZED);
}
static CUresult deviceGetName(char *name, int length, int device) {
    ENTRY("cuDeviceGetName", 0, "%d", device);
    snprintf(name, length, "Stub");
    LEAVE(OK);
}
static CUresult deviceGetAttribute(int *value, int attribute, int device) {
    ENTRY("cuDeviceGetAttribute", 0, "%d of %d", attribute, device);
    *value = attribute == 75 ? 8 : attribute == 76 ? 7 : attribute == 18 ? integrated : 0;
    LEAVE(OK);
}
static CUresult primaryRetain(void **context, int device) {
    ENTRY("cuDevicePrimaryCtxRetain", 0, "%d", device);
    context_references++;
    *context = &primary;
    LEAVE(OK);
}
static CUresult primaryRelease(int device) {
    RELEASE("cuDevicePrimaryCtxRelease", "%d", device);
    if (context_references) context_references--;
    RELEASED(OK);
}
static CUresult ctxSetCurrent(void *context) {
    ENTRY("cuCtxSetCurrent", 0, "");
    current = context;
    LEAVE(OK);
}
static CUresult ctxGetCurrent(void **context) {
    ENTRY("cuCtxGetCurrent", 0, "");
    *context = current;
    LEAVE(OK);
}
static const struct { int code; const char *name; } NAMES[] = {
    {OK, "CUDA_SUCCESS"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"},
    {NOT_READY, "CUDA_ERROR_NOT_READY"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
    {LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED"},
    {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
    {CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"},
    {CAPTURE_ISOLATION, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"},
    {999, "CUDA_ERROR_UNKNOWN"},
};
static CUresult getErrorName(CUresult error, const char **name) {
    for (size_t i = 0; i < sizeof NAMES / sizeof *NAMES; i++) {
        *name = NAMES[i].name;
        if (NAMES[i].code == error) return OK;
    }
    *name = NULL;
    return INVALID_VALUE;
}

#define DECLARE(name) CUresult name()
DECLARE(memAlloc); DECLARE(memFree); DECLARE(memAllocHost); DECLARE(memHostAlloc); DECLARE(memFreeHost);
DECLARE(memGetInfo); DECLARE(deviceTotalMem); DECLARE(streamCreate); DECLARE(streamDestroy);
DECLARE(streamSynchronize); DECLARE(ctxSynchronize); DECLARE(streamWaitEvent); DECLARE(streamBeginCapture);
DECLARE(streamEndCapture); DECLARE(graphInstantiate); DECLARE(graphLaunch); DECLARE(graphDestroy);
DECLARE(graphExecDestroy); DECLARE(eventCreate); DECLARE(eventDestroy); DECLARE(eventRecord);
DECLARE(eventSynchronize); DECLARE(memcpyHtoDAsync); DECLARE(memcpyDtoHAsync); DECLARE(memcpyDtoDAsync);
DECLARE(memcpy2DAsync); DECLARE(memsetD8Async);

EXPORT CUresult cuGetProcAddress_v2(const char *name, void **function, int wanted, uint64_t flags, int *status);

/* The first CUDA version that has a function with this signature. */
static const struct { const char *name; int since; void *function; } SYMBOLS[] = {
    {"cuGetProcAddress", 12000, cuGetProcAddress_v2}, /* bindings up to 12.8 ask for it by name */
    {"cuInit", 2000, init},
    {"cuDriverGetVersion", 2020, driverGetVersion},
    {"cuDeviceGet", 2000, deviceGet},
    {"cuDeviceGetCount", 2000, deviceGetCount},
    {"cuDeviceGetName", 2000, deviceGetName},
    {"cuDeviceGetAttribute", 2000, deviceGetAttribute},
    {"cuDeviceTotalMem", 3020, deviceTotalMem},
    {"cuDevicePrimaryCtxRetain", 7000, primaryRetain},
    {"cuDevicePrimaryCtxRelease", 11000, primaryRelease},
    {"cuCtxSetCurrent", 4000, ctxSetCurrent},
    {"cuCtxGetCurrent", 4000, ctxGetCurrent},
    {"cuCtxSynchronize", 2000, ctxSynchronize},
    {"cuGetErrorName", 6000, getErrorName},
    {"cuGetErrorString", 6000, getErrorName},
    {"cuMemAlloc", 3020, memAlloc},
    {"cuMemFree", 3020, memFree},
    {"cuMemAllocHost", 3020, memAllocHost},
    {"cuMemHostAlloc", 2020, memHostAlloc},
    {"cuMemFreeHost", 2000, memFreeHost},
    {"cuMemGetInfo", 3020, memGetInfo},
    {"cuMemcpyHtoDAsync", 3020, memcpyHtoDAsync},
    {"cuMemcpyDtoHAsync", 3020, memcpyDtoHAsync},
    {"cuMemcpyDtoDAsync", 3020, memcpyDtoDAsync},
    {"cuMemcpy2DAsync", 3020, memcpy2DAsync},
    {"cuMemsetD8Async", 3020, memsetD8Async},
    {"cuStreamCreate", 2000, streamCreate},
    {"cuStreamDestroy", 4000, streamDestroy},
    {"cuStreamSynchronize", 2000, streamSynchronize},
    {"cuStreamWaitEvent", 3020, streamWaitEvent},
    {"cuStreamBeginCapture", 10010, streamBeginCapture},
    {"cuStreamEndCapture", 10000, streamEndCapture},
    {"cuGraphInstantiateWithFlags", 11040, graphInstantiate},
    {"cuGraphLaunch", 10000, graphLaunch},
    {"cuGraphDestroy", 10000, graphDestroy},
    {"cuGraphExecDestroy", 10000, graphExecDestroy},
    {"cuEventCreate", 2000, eventCreate},
    {"cuEventDestroy", 4000, eventDestroy},
    {"cuEventRecord", 2000, eventRecord},
    {"cuEventSynchronize", 2000, eventSynchronize},
};
EXPORT CUresult cuGetProcAddress_v2(const char *name, void **function, int wanted, uint64_t flags, int *status) {
    int best = 0, known = 0;
    (void)flags;
    *function = NULL;
    for (size_t i = 0; i < sizeof SYMBOLS / sizeof *SYMBOLS; i++) {
        if (strcmp(SYMBOLS[i].name, name)) continue;
        known = 1;
        if (SYMBOLS[i].since > wanted || SYMBOLS[i].since < best) continue;
        best = SYMBOLS[i].since;
        *function = SYMBOLS[i].function;
    }
    if (status) *status = *function ? 0 : known ? 2 : 1;
    return *function ? OK : NOT_FOUND;
}

/* The `count`-th call from now whose name begins with `prefix` returns `code`; 0: none does. */
EXPORT void stub_fail(const char *prefix, long count, CUresult code) {
    lock();
    snprintf(fail_prefix, sizeof fail_prefix, "%s", prefix);
    fail_in = count;
    fail_with = code;
    unlock();
}
EXPORT long stub_calls(void) { return calls; }
EXPORT void stub_integrated(int yes) { integrated = yes; }
EXPORT void stub_version(int cuda) { version = cuda; }
EXPORT void stub_trace(int on) {
    lock();
    free(trace);
    trace = on ? calloc(1, 1) : NULL;
    traced = 0;
    unlock();
}
EXPORT const char *stub_traced(void) { return trace ? trace : ""; }
