/* Streams as queues, events between them, capture of a queue into a graph and its replay. */
#define _GNU_SOURCE
#include "stub.h"
#include <stdlib.h>
#include <string.h>

struct Graph {
    struct Queue ops;
    long count;
};
struct Stream {
    struct Queue queue;
    struct Graph *capture;
    int invalid, running;
    CUresult error; /* sticky until the next synchronisation */
    struct Stream *next;
};
static struct Stream *streams;
static long graphs, events;
uint64_t copied[DIRECTIONS];
static int discards;
static uint64_t launches, unpinned;

static void append(struct Queue *queue, struct Op op) {
    struct Op *new = malloc(sizeof *new);
    *new = op;
    new->next = NULL;
    if (!queue->last) queue->last = &queue->first;
    *queue->last = new;
    queue->last = &new->next;
}
static int pop(struct Queue *queue, struct Op *op) {
    struct Op *first = queue->first;
    if (!first) return 0;
    *op = *first;
    queue->first = first->next;
    if (!queue->first) queue->last = &queue->first;
    free(first);
    return 1;
}
static void empty(struct Queue *queue) {
    struct Op op;
    while (pop(queue, &op)) {}
}

int capturing(void) {
    for (struct Stream *s = streams; s; s = s->next)
        if (s->capture) return 1;
    return 0;
}
void invalidate_captures(void) {
    for (struct Stream *s = streams; s; s = s->next)
        if (s->capture) s->invalid = 1;
}
static int exists(struct Stream *stream) {
    for (struct Stream *s = streams; s; s = s->next)
        if (s == stream) return 1;
    return 0;
}
CUresult put(struct Stream *stream, struct Op op) {
    if (!exists(stream)) return INVALID_HANDLE;
    if (stream->capture && stream->invalid) return CAPTURE_INVALIDATED;
    append(stream->capture ? &stream->capture->ops : &stream->queue, op);
    if (stream->capture) stream->capture->count++;
    return OK;
}

static CUresult drain(struct Stream *stream, struct Event *until, uint64_t turn);

static CUresult execute(struct Op *op) {
    switch (op->kind) {
    case COPY:
        if (op->direction != H2D && !lives((uintptr_t)op->from, op->width, DEVICE)) return ILLEGAL_ADDRESS;
        if (op->direction != D2H && !lives((uintptr_t)op->to, op->width, DEVICE)) return ILLEGAL_ADDRESS;
        for (size_t row = 0; row < op->height && !(discards && op->direction == H2D); row++)
            memmove(op->to + row * op->to_pitch, op->from + row * op->from_pitch, op->width);
        copied[op->direction] += op->width * op->height;
        return OK;
    case FILL:
        if (!lives((uintptr_t)op->to, op->width, DEVICE)) return ILLEGAL_ADDRESS;
        memset(op->to, op->value, op->width);
        return OK;
    case CALL:
        return op->function(op->argument) ? LAUNCH_FAILED : OK;
    case RECORD:
        if (op->event->done < op->turn) op->event->done = op->turn;
        return OK;
    case WAIT:
        if (op->event->done >= op->turn || !exists(op->event->stream)) return OK;
        return drain(op->event->stream, op->event, op->turn);
    }
    return INVALID_VALUE;
}
static CUresult drain(struct Stream *stream, struct Event *until, uint64_t turn) {
    struct Op op;
    if (stream->running) return OK; /* called from one of its own host functions */
    stream->running = 1;
    while (!(until && until->done >= turn) && pop(&stream->queue, &op)) {
        CUresult result = stream->error && op.kind != RECORD ? OK : execute(&op);
        if (result) stream->error = result;
    }
    stream->running = 0;
    CUresult error = stream->error;
    if (!until) stream->error = OK;
    return error;
}
CUresult drain_all(void) {
    CUresult result = OK;
    for (struct Stream *s = streams; s; s = s->next) {
        CUresult one = s->capture ? OK : drain(s, NULL, 0);
        if (one && !result) result = one;
    }
    return result;
}
static CUresult synchronize(struct Stream *stream) {
    if (capturing()) {
        invalidate_captures();
        return CAPTURE_UNSUPPORTED;
    }
    return stream ? drain(stream, NULL, 0) : drain_all();
}

CUresult streamCreate(struct Stream **stream, unsigned flags) {
    ENTRY("cuStreamCreate", 1, "flags %u", flags);
    struct Stream *new = calloc(1, sizeof *new);
    new->next = streams;
    streams = *stream = new;
    LEAVE(OK);
}
CUresult streamDestroy(struct Stream *stream) {
    RELEASE("cuStreamDestroy", "");
    CUresult last = INVALID_HANDLE;
    for (struct Stream **at = &streams; *at; at = &(*at)->next) {
        if (*at != stream) continue;
        if (!stream->capture) drain(stream, NULL, 0);
        *at = stream->next;
        empty(&stream->queue);
        if (stream->capture) empty(&stream->capture->ops);
        free(stream->capture);
        free(stream);
        last = OK;
        break;
    }
    RELEASED(last);
}
CUresult streamSynchronize(struct Stream *stream) {
    ENTRY("cuStreamSynchronize", 1, "");
    LEAVE(exists(stream) ? synchronize(stream) : INVALID_HANDLE);
}
CUresult ctxSynchronize(void) {
    ENTRY("cuCtxSynchronize", 1, "");
    LEAVE(synchronize(NULL));
}
CUresult streamWaitEvent(struct Stream *stream, struct Event *event, unsigned flags) {
    ENTRY("cuStreamWaitEvent", 1, "flags %u", flags);
    if (exists(stream) && stream->capture) { /* the event was recorded outside of the capture */
        stream->invalid = 1;
        LEAVE(CAPTURE_ISOLATION);
    }
    LEAVE(put(stream, (struct Op){.kind = WAIT, .event = event, .turn = event->wanted}));
}
CUresult streamBeginCapture(struct Stream *stream, int mode) {
    ENTRY("cuStreamBeginCapture", 1, "mode %d", mode);
    if (!exists(stream)) LEAVE(INVALID_HANDLE);
    if (stream->capture) LEAVE(CAPTURE_UNSUPPORTED);
    stream->capture = calloc(1, sizeof *stream->capture);
    stream->invalid = 0;
    LEAVE(OK);
}
CUresult streamEndCapture(struct Stream *stream, struct Graph **graph) {
    RELEASE("cuStreamEndCapture", ""); /* ends even where it fails */
    CUresult last = OK;
    if (!exists(stream) || !stream->capture) RELEASED(INVALID_HANDLE);
    struct Graph *made = stream->capture;
    stream->capture = NULL;
    if (stream->invalid || result) {
        empty(&made->ops);
        free(made);
        *graph = NULL;
        last = CAPTURE_INVALIDATED;
    } else {
        graphs++;
        *graph = made;
    }
    RELEASED(last);
}
CUresult graphInstantiate(struct Graph **executable, struct Graph *graph, unsigned long long flags) {
    ENTRY("cuGraphInstantiate", 1, "%ld nodes flags %llu", graph->count, flags);
    struct Graph *made = calloc(1, sizeof *made);
    for (struct Op *op = graph->ops.first; op; op = op->next) append(&made->ops, *op);
    made->count = graph->count;
    graphs++;
    *executable = made;
    LEAVE(OK);
}
CUresult graphLaunch(struct Graph *executable, struct Stream *stream) {
    ENTRY("cuGraphLaunch", 1, "%ld nodes", executable->count);
    CUresult last = exists(stream) ? OK : INVALID_HANDLE;
    for (struct Op *op = executable->ops.first; op && !last; op = op->next) last = put(stream, *op);
    launches++;
    LEAVE(last);
}
CUresult graphDestroy(struct Graph *graph) {
    RELEASE("cuGraphDestroy", "");
    empty(&graph->ops);
    free(graph);
    graphs--;
    RELEASED(OK);
}
CUresult graphExecDestroy(struct Graph *graph) {
    RELEASE("cuGraphExecDestroy", "");
    empty(&graph->ops);
    free(graph);
    graphs--;
    RELEASED(OK);
}

CUresult eventCreate(struct Event **event, unsigned flags) {
    ENTRY("cuEventCreate", 1, "flags %u", flags);
    *event = calloc(1, sizeof **event);
    events++;
    LEAVE(OK);
}
CUresult eventDestroy(struct Event *event) {
    RELEASE("cuEventDestroy", "");
    CUresult last = drain_all(); /* no queue may point to it */
    free(event);
    events--;
    RELEASED(last);
}
CUresult eventRecord(struct Event *event, struct Stream *stream) {
    ENTRY("cuEventRecord", 1, "");
    event->stream = stream;
    event->wanted++;
    LEAVE(put(stream, (struct Op){.kind = RECORD, .event = event, .turn = event->wanted}));
}
CUresult eventSynchronize(struct Event *event) {
    ENTRY("cuEventSynchronize", 1, "");
    if (event->done >= event->wanted) LEAVE(OK);
    if (capturing()) {
        invalidate_captures();
        LEAVE(CAPTURE_UNSUPPORTED);
    }
    LEAVE(drain(event->stream, event, event->wanted));
}

static CUresult copy(struct Stream *stream, struct Op op) {
    size_t from = op.width + (op.height - 1) * op.from_pitch, to = op.width + (op.height - 1) * op.to_pitch;
    if (!op.width || !op.height) return OK;
    if (op.direction != H2D && !lives((uintptr_t)op.from, from, DEVICE)) return INVALID_VALUE;
    if (op.direction != D2H && !lives((uintptr_t)op.to, to, DEVICE)) return INVALID_VALUE;
    if (op.direction == H2D && !lives((uintptr_t)op.from, from, PINNED)) unpinned++;
    if (op.direction == D2H && !lives((uintptr_t)op.to, to, PINNED)) unpinned++;
    op.kind = COPY;
    return put(stream, op);
}
CUresult memcpyHtoDAsync(CUdeviceptr to, const void *from, size_t bytes, struct Stream *stream) {
    ENTRY("cuMemcpyHtoDAsync", 1, "%zu", bytes);
    LEAVE(copy(stream, (struct Op){.direction = H2D, .to = (void *)to, .from = from, .width = bytes, .height = 1}));
}
CUresult memcpyDtoHAsync(void *to, CUdeviceptr from, size_t bytes, struct Stream *stream) {
    ENTRY("cuMemcpyDtoHAsync", 1, "%zu", bytes);
    LEAVE(copy(stream, (struct Op){.direction = D2H, .to = to, .from = (void *)from, .width = bytes, .height = 1}));
}
CUresult memcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, struct Stream *stream) {
    ENTRY("cuMemcpyDtoDAsync", 1, "%zu", bytes);
    LEAVE(copy(stream, (struct Op){.direction = D2D, .to = (void *)to, .from = (void *)from, .width = bytes, .height = 1}));
}
/* CUDA_MEMCPY2D, device to device only */
struct Copy2D {
    size_t from_x, from_y;
    unsigned from_type;
    const void *from_host;
    CUdeviceptr from;
    void *from_array;
    size_t from_pitch, to_x, to_y;
    unsigned to_type;
    void *to_host;
    CUdeviceptr to;
    void *to_array;
    size_t to_pitch, width, height;
};
CUresult memcpy2DAsync(const struct Copy2D *c, struct Stream *stream) {
    ENTRY("cuMemcpy2DAsync", 1, "%zu x %zu", c->width, c->height);
    if (c->from_type != 2 || c->to_type != 2 || c->width > c->from_pitch || c->width > c->to_pitch)
        LEAVE(INVALID_VALUE);
    LEAVE(copy(stream, (struct Op){.direction = D2D, .to = (void *)c->to, .from = (void *)c->from,
        .width = c->width, .height = c->height, .to_pitch = c->to_pitch, .from_pitch = c->from_pitch}));
}
CUresult memsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, struct Stream *stream) {
    ENTRY("cuMemsetD8Async", 1, "%zu", bytes);
    if (!lives(to, bytes, DEVICE)) LEAVE(INVALID_VALUE);
    LEAVE(put(stream, (struct Op){.kind = FILL, .to = (void *)to, .value = value, .width = bytes}));
}

/* What a scripted engine does on the device; in a capture it becomes a node. */
EXPORT CUresult stub_enqueue(struct Stream *stream, HostFunction function, void *argument) {
    lock();
    LEAVE(put(stream, (struct Op){.kind = CALL, .function = function, .argument = argument}));
}
/* Count what comes to the device and leave its pages untouched: it is not host memory on a board. */
EXPORT void stub_discard(int yes) { discards = yes; }
EXPORT uint64_t stub_copied(int direction) { return copied[direction]; }
EXPORT uint64_t stub_launches(void) { return launches; }
EXPORT uint64_t stub_unpinned(void) { return unpinned; }
EXPORT long stub_handles(void) {
    long count = graphs + events + context_references;
    for (struct Stream *s = streams; s; s = s->next) count++;
    return count;
}
