/* Allocations, with a budget, canaries behind each, and poison in fresh device memory. */
#define _GNU_SOURCE
#include "stub.h"
#include <stdlib.h>
#include <string.h>

enum { CANARY = 64, POISON_LIMIT = 64 << 20 };
struct Allocation {
    uint64_t address;
    size_t bytes;
    enum Space space;
    struct Allocation *next;
};
static struct Allocation *live;
static size_t total = (size_t)8 << 30, used, peak;
static long overruns;

static CUresult take(size_t bytes, enum Space space, uint64_t *address) {
    if (!bytes) return INVALID_VALUE;
    if (capturing()) {
        invalidate_captures();
        return CAPTURE_UNSUPPORTED;
    }
    void *memory;
    if (used + bytes > total || posix_memalign(&memory, 4096, bytes + CANARY)) return OUT_OF_MEMORY;
    if (bytes <= POISON_LIMIT) memset(memory, 0xff, bytes); /* NaN in every float format */
    memset((uint8_t *)memory + bytes, 0xa5, CANARY);
    struct Allocation *new = malloc(sizeof *new);
    *new = (struct Allocation){(uintptr_t)memory, bytes, space, live};
    live = new;
    used += bytes;
    if (used > peak) peak = used;
    *address = new->address;
    return OK;
}

static CUresult give(uint64_t address, enum Space space) {
    if (!address) return OK;
    CUresult before = drain_all(); /* a free waits for the device */
    for (struct Allocation **at = &live; *at; at = &(*at)->next) {
        struct Allocation *old = *at;
        if (old->address != address || old->space != space) continue;
        for (int i = 0; i < CANARY; i++) {
            if (((uint8_t *)address)[old->bytes + i] != 0xa5) {
                overruns++;
                break;
            }
        }
        *at = old->next;
        used -= old->bytes;
        free((void *)address);
        free(old);
        return before;
    }
    return INVALID_VALUE;
}

int lives(uint64_t address, size_t bytes, enum Space space) {
    for (struct Allocation *at = live; at; at = at->next)
        if (at->space == space && address >= at->address && address + bytes <= at->address + at->bytes)
            return 1;
    return 0;
}

CUresult memAlloc(CUdeviceptr *address, size_t bytes) {
    ENTRY("cuMemAlloc", 1, "%zu", bytes);
    LEAVE(take(bytes, DEVICE, address));
}
CUresult memFree(CUdeviceptr address) {
    RELEASE("cuMemFree", "");
    RELEASED(give(address, DEVICE));
}
CUresult memAllocHost(void **address, size_t bytes) {
    ENTRY("cuMemAllocHost", 1, "%zu", bytes);
    LEAVE(take(bytes, PINNED, (uint64_t *)address));
}
CUresult memHostAlloc(void **address, size_t bytes, unsigned flags) {
    ENTRY("cuMemHostAlloc", 1, "%zu flags %u", bytes, flags);
    LEAVE(take(bytes, PINNED, (uint64_t *)address));
}
CUresult memFreeHost(void *address) {
    RELEASE("cuMemFreeHost", "");
    RELEASED(give((uintptr_t)address, PINNED));
}
CUresult memGetInfo(size_t *free_bytes, size_t *total_bytes) {
    ENTRY("cuMemGetInfo", 1, "");
    *free_bytes = total - used;
    *total_bytes = total;
    LEAVE(OK);
}
CUresult deviceTotalMem(size_t *bytes, int device) {
    ENTRY("cuDeviceTotalMem", 0, "%d", device);
    *bytes = total;
    LEAVE(OK);
}

EXPORT size_t stub_used(void) { return used; }
EXPORT size_t stub_peak(void) { return peak; }
EXPORT void stub_reset_peak(void) { peak = used; }
EXPORT void stub_budget(size_t bytes) { total = bytes; }
EXPORT long stub_overruns(void) { return overruns; }
EXPORT long stub_live(int space) {
    long count = 0;
    for (struct Allocation *at = live; at; at = at->next) count += (int)at->space == space;
    return count;
}
