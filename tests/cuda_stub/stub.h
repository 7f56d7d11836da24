/* A driver without a GPU: device memory is host memory, streams are queues that run late.
 *
 * Work put on a stream waits there until somebody synchronises, so that a missing
 * synchronisation shows as stale data in every run and not as a race in some.
 */
#ifndef STUB_H
#define STUB_H
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

typedef int CUresult;
typedef uint64_t CUdeviceptr;
enum {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    LAUNCH_FAILED = 719,
    CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901,
    CAPTURE_UNJOINED = 904,
    CAPTURE_ISOLATION = 905,
};
enum Direction { H2D, D2H, D2D, DIRECTIONS };
enum Space { DEVICE, PINNED };

typedef int (*HostFunction)(void *);

struct Stream;
struct Event {
    struct Stream *stream; /* where it was recorded last */
    uint64_t wanted, done; /* how often it was recorded, and how often that was reached */
};
enum Kind { COPY, FILL, CALL, RECORD, WAIT };
struct Op {
    enum Kind kind;
    enum Direction direction;
    uint8_t *to;
    const uint8_t *from;
    size_t width, height, to_pitch, from_pitch;
    uint8_t value;
    HostFunction function;
    void *argument;
    struct Event *event;
    uint64_t turn;
    struct Op *next;
};
struct Queue {
    struct Op *first, **last;
};

/* control.c: every entry of the driver passes here; what it returns is the call's injected fate */
CUresult enter(const char *name, const char *format, ...);
void lock(void);
void unlock(void);
extern int context_references;
CUresult current_context(void); /* OK where this thread has one */

/* memory.c */
int lives(uint64_t address, size_t bytes, enum Space space);

/* streams.c */
CUresult put(struct Stream *stream, struct Op op);
int capturing(void);
void invalidate_captures(void);
CUresult drain_all(void);
extern uint64_t copied[DIRECTIONS];

/* One lock around every entry; `checks` is what the call needs before it does anything. */
#define ENTRY(name, checks, format, ...)                        \
    lock();                                                     \
    CUresult result = enter(name, format, ##__VA_ARGS__);       \
    if (!result && (checks)) result = current_context();        \
    if (result) { unlock(); return result; }
#define LEAVE(value) do { CUresult left = (value); unlock(); return left; } while (0)
/* A release that fails has still released: that is how CUDA reports what went wrong before it. */
#define RELEASE(name, format, ...)                              \
    lock();                                                     \
    CUresult result = enter(name, format, ##__VA_ARGS__);
#define RELEASED(value) do { CUresult left = (value); unlock(); return result ? result : left; } while (0)

#endif
