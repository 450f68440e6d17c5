/* SPDX-License-Identifier: Apache-2.0
 * Events. */
#include <stdlib.h>

#include "fake.h"

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
    free(event);
}

wsync_cu_result_t fake_event_check(const char *call, const struct wsync_cu_event *event,
                                   const struct wsync_cu_context *context)
{
    for (const struct wsync_cu_event *at = fake.events; at != NULL; at = at->next) {
        if (at == event && !at->dead) {
            return context == NULL || at->context == context ? WSYNC_CU_SUCCESS
                                                             : WSYNC_CU_INVALID_CONTEXT;
        }
    }
    return fake_refuse(WSYNC_CU_INVALID_HANDLE, "%s: no such event, or destroyed", call);
}

wsync_cu_result_t fake_event_create(wsync_cu_event_t *event, unsigned flags)
{
    struct wsync_cu_context *context = NULL;
    struct wsync_cu_event *made;
    const wsync_cu_result_t code = fake_enter_context("cuEventCreate", &context);

    if (code != WSYNC_CU_SUCCESS) {
        return code;
    }
    made = calloc(1, sizeof(*made));
    if (made == NULL || (flags & ~(unsigned)WSYNC_CU_EVENT_DISABLE_TIMING) != 0) {
        free(made);
        return WSYNC_CU_INVALID_VALUE;
    }
    made->context = context;
    made->flags = flags;
    fake_lock();
    made->next = fake.events;
    fake.events = made;
    fake_unlock();
    *event = made;
    return WSYNC_CU_SUCCESS;
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
    if (code == WSYNC_CU_SUCCESS) {
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
        recorded = atomic_load(&event->recorded);
        if (recorded == 0) {
            code = fake_refuse(WSYNC_CU_ILLEGAL_STATE, "%s: the event was never recorded",
                               call);
        } else if (atomic_load(&event->completed) < recorded) {
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
        code = WSYNC_CU_INVALID_HANDLE;
    }
    if (code == WSYNC_CU_SUCCESS) {
        const uint64_t first = __atomic_load_n(&begin->when, __ATOMIC_RELAXED);
        const uint64_t last = __atomic_load_n(&end->when, __ATOMIC_RELAXED);

        *ms = (float)(int64_t)(last - first) / 1e6F;
    }
    return code;
}
