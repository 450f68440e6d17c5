/* SPDX-License-Identifier: Apache-2.0
 * Events, of one process or of several. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "fake.h"

#define EVENT_NAME "fakecuda-event"

enum { HANDLE_MAGIC = 0x65766e74 };

typedef struct handle {
    uint32_t magic;
    int32_t pid;
    int32_t fd;
    int32_t device;
    uint64_t flags;
} handle_t;

_Static_assert(sizeof(handle_t) <= sizeof(wsync_cu_ipc_t), "handles are 64 bytes");

void fake_event_let_go(struct wsync_cu_event *event)
{
    if (!event->dead || event->pending > 0) {
        return;
    }
    for (struct wsync_cu_event **at = &fake.events; *at != NULL; at = &(*at)->next) {
        if (*at == event) {
            *at = event->next;
            break;
        }
    }
    fake_shared_unmap(event->shared);
    if (event->fd >= 0) {
        (void)close(event->fd);
    }
    free(event);
}

wsync_cu_result_t fake_event_check(const char *call, const struct wsync_cu_event *event,
                                   const struct wsync_cu_context *context)
{
    for (const struct wsync_cu_event *at = fake.events; at != NULL; at = at->next) {
        if (at == event && !at->dead) {
            return context == NULL || at->context == context
                       ? WSYNC_CU_SUCCESS
                       : fake_refuse(WSYNC_CU_INVALID_CONTEXT,
                                     "%s: an event of another context", call);
        }
    }
    return fake_refuse(WSYNC_CU_INVALID_HANDLE, "%s: no such event, or destroyed", call);
}

/* Moves fd (-1: of this process alone) into a new event; locked. */
static struct wsync_cu_event *add_event(struct wsync_cu_context *context, unsigned flags,
                                        int fd, bool opened)
{
    struct wsync_cu_event *made = calloc(1, sizeof(*made));
    fake_shared_t *shared = fake_shared_map(fd, 0);

    if (made == NULL || shared == NULL) {
        free(made);
        if (fd >= 0) {
            (void)close(fd);
        }
        return NULL;
    }
    *made = (struct wsync_cu_event){.context = context,
                                    .flags = flags,
                                    .fd = fd,
                                    .opened = opened,
                                    .shared = shared,
                                    .next = fake.events};
    fake.events = made;
    return made;
}

wsync_cu_result_t fake_event_create(wsync_cu_event_t *event, unsigned flags)
{
    struct wsync_cu_context *context = NULL;
    struct wsync_cu_event *made;
    int fd = -1;
    wsync_cu_result_t code = fake_enter_context("cuEventCreate", &context);

    if (code != WSYNC_CU_SUCCESS) {
        return code;
    }
    if ((flags & WSYNC_CU_EVENT_INTERPROCESS) != 0) {
        if ((flags & WSYNC_CU_EVENT_DISABLE_TIMING) == 0) {
            return fake_refuse(WSYNC_CU_INVALID_VALUE,
                               "cuEventCreate: interprocess events have no timing");
        }
        fd = memfd_create(EVENT_NAME, MFD_CLOEXEC);
        if (fd < 0 || ftruncate(fd, (off_t)sizeof(fake_shared_t)) != 0) {
            return WSYNC_CU_OPERATING_SYSTEM;
        }
    }
    fake_lock();
    made = add_event(context, flags, fd, false);
    fake_unlock();
    *event = made;
    return made != NULL ? WSYNC_CU_SUCCESS : WSYNC_CU_OUT_OF_MEMORY;
}

wsync_cu_result_t fake_event_destroy(wsync_cu_event_t event)
{
    struct wsync_cu_context *context = NULL;
    wsync_cu_result_t code = fake_enter_return("cuEventDestroy", &context);

    if (code != WSYNC_CU_SUCCESS) {
        return code;
    }
    fake_lock();
    code = fake_event_check("cuEventDestroy", event, context);
    if (code == WSYNC_CU_SUCCESS && !event->opened &&
        fake_shared_user(event->shared) != 0) {
        code =
            fake_refuse(WSYNC_CU_ILLEGAL_STATE, "cuEventDestroy: process %ld has it open",
                        (long)fake_shared_user(event->shared));
    } else if (code == WSYNC_CU_SUCCESS) {
        if (event->opened) {
            fake_shared_leave(event->shared);
        } else {
            atomic_store(&event->shared->gone, true);
        }
        event->dead = true;
        fake_event_let_go(event);
    }
    fake_unlock();
    return fake_leave(code);
}

static wsync_cu_result_t query(const char *call, const struct wsync_cu_event *event)
{
    uint64_t recorded;
    wsync_cu_result_t code;

    fake_lock();
    code = fake_event_check(call, event, NULL);
    if (code == WSYNC_CU_SUCCESS) {
        recorded = atomic_load(&event->shared->recorded);
        if (recorded == 0) {
            code = fake_refuse(WSYNC_CU_ILLEGAL_STATE, "%s: the event was never recorded",
                               call);
        } else if (atomic_load(&event->shared->completed) < recorded) {
            code = WSYNC_CU_NOT_READY;
        }
    }
    fake_unlock();
    return code;
}

wsync_cu_result_t fake_event_query(wsync_cu_event_t event)
{
    struct wsync_cu_context *context = NULL;
    const wsync_cu_result_t code = fake_enter_context("cuEventQuery", &context);

    return code != WSYNC_CU_SUCCESS ? code : query("cuEventQuery", event);
}

wsync_cu_result_t fake_event_elapsed(float *ms, wsync_cu_event_t begin,
                                     wsync_cu_event_t end)
{
    struct wsync_cu_context *context = NULL;
    wsync_cu_result_t code = fake_enter_context("cuEventElapsedTime", &context);

    if (code == WSYNC_CU_SUCCESS) {
        code = query("cuEventElapsedTime", begin);
    }
    if (code == WSYNC_CU_SUCCESS) {
        code = query("cuEventElapsedTime", end);
    }
    if (code == WSYNC_CU_SUCCESS &&
        ((begin->flags | end->flags) & WSYNC_CU_EVENT_DISABLE_TIMING) != 0) {
        code = fake_refuse(WSYNC_CU_INVALID_HANDLE, "cuEventElapsedTime: without timing");
    }
    if (code == WSYNC_CU_SUCCESS) {
        const uint64_t first = __atomic_load_n(&begin->when, __ATOMIC_RELAXED);
        const uint64_t last = __atomic_load_n(&end->when, __ATOMIC_RELAXED);

        *ms = (float)(int64_t)(last - first) / 1e6F;
    }
    return code;
}

wsync_cu_result_t fake_ipc_get_event(wsync_cu_ipc_t *handle, wsync_cu_event_t event)
{
    handle_t made = {.magic = HANDLE_MAGIC, .pid = (int32_t)getpid()};
    wsync_cu_result_t code = fake_enter("cuIpcGetEventHandle");

    if (code != WSYNC_CU_SUCCESS) {
        return code;
    }
    fake_lock();
    code = fake_event_check("cuIpcGetEventHandle", event, NULL);
    if (code == WSYNC_CU_SUCCESS && (event->fd < 0 || event->opened)) {
        code =
            fake_refuse(WSYNC_CU_INVALID_HANDLE,
                        "cuIpcGetEventHandle: not an interprocess event of this process");
    } else if (code == WSYNC_CU_SUCCESS) {
        made.fd = event->fd;
        made.device = event->context->device;
        made.flags = event->flags;
        memset(handle, 0, sizeof(*handle));
        memcpy(handle, &made, sizeof(made));
    }
    fake_unlock();
    return code;
}

wsync_cu_result_t fake_ipc_open_event(wsync_cu_event_t *event, wsync_cu_ipc_t handle)
{
    struct wsync_cu_context *context = NULL;
    struct wsync_cu_event *made = NULL;
    handle_t wanted;
    int fd;
    wsync_cu_result_t code = fake_enter_context("cuIpcOpenEventHandle", &context);

    if (code != WSYNC_CU_SUCCESS) {
        return code;
    }
    memcpy(&wanted, &handle, sizeof(wanted));
    if (wanted.magic != HANDLE_MAGIC) {
        return fake_refuse(WSYNC_CU_INVALID_VALUE, "cuIpcOpenEventHandle: no handle");
    }
    if (wanted.pid == (int32_t)getpid()) {
        return fake_refuse(WSYNC_CU_INVALID_CONTEXT,
                           "cuIpcOpenEventHandle in the process that made it");
    }
    fd = fake_steal(wanted.pid, wanted.fd, EVENT_NAME);
    if (fd < 0) {
        return fake_refuse(WSYNC_CU_INVALID_VALUE, "cuIpcOpenEventHandle: it is gone");
    }
    fake_lock();
    made = add_event(context, (unsigned)wanted.flags, fd, true);
    if (made == NULL) {
        code = WSYNC_CU_OUT_OF_MEMORY;
    } else if (atomic_load(&made->shared->gone) || !fake_shared_join(made->shared)) {
        made->dead = true;
        fake_event_let_go(made);
        code = fake_refuse(WSYNC_CU_INVALID_VALUE, "cuIpcOpenEventHandle: it is gone");
    } else {
        *event = made;
    }
    fake_unlock();
    return code;
}
