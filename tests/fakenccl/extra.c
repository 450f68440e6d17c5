/* SPDX-License-Identifier: Apache-2.0
 * What came after 2.18: the old library has none of it. */
#include <stdlib.h>
#include <string.h>

#include "fake_nccl.h"

enum { WINDOW_ALIGNMENT = 4096, MEMORY_VERSION = 3020 };

typedef struct allocation {
    struct allocation *next;
    wsync_cu_ptr_t at;
} allocation_t;

static allocation_t *allocations;
static long registrations;

void fake_registrations_free(struct wsync_nccl_comm *comm)
{
    while (comm->registrations != NULL) {
        fake_registration_t *first = comm->registrations;

        comm->registrations = first->next;
        free(first);
        registrations--;
    }
}

long fake_allocations(void)
{
    long count = 0;

    for (const allocation_t *at = allocations; at != NULL; at = at->next) {
        count++;
    }
    return count;
}

long fake_registrations(void)
{
    return registrations;
}

#ifndef FAKENCCL_OLD

EXPORT int ncclMemAlloc(void **data, size_t nbytes);
EXPORT int ncclMemFree(void *data);
EXPORT int ncclCommRegister(wsync_nccl_comm_t comm, void *data, size_t nbytes,
                            void **handle);
EXPORT int ncclCommDeregister(wsync_nccl_comm_t comm, void *handle);
EXPORT int ncclCommWindowRegister(wsync_nccl_comm_t comm, void *data, size_t nbytes,
                                  wsync_nccl_window_t *window, int flags);
EXPORT int ncclCommWindowDeregister(wsync_nccl_comm_t comm, wsync_nccl_window_t window);
EXPORT int ncclAlltoAll(const void *source, void *destination, size_t count, int type,
                        wsync_nccl_comm_t comm, wsync_cu_stream_t stream);
EXPORT int ncclCommRevoke(wsync_nccl_comm_t comm, int flags);
EXPORT int ncclCommSuspend(wsync_nccl_comm_t comm, int flags);
EXPORT int ncclCommResume(wsync_nccl_comm_t comm);

/* --- memory -----------------------------------------------------------------------------
 */

/* A function of the driver, as its table has it. */
static void *driver_function(const char *symbol)
{
    int (*look_up)(const char *, void **, int, uint64_t, int *);
    void *address = fake_driver_symbol("cuGetProcAddress_v2");
    int found = 0;

    memcpy(&look_up, (const void *)&address, sizeof(look_up));
    if (address != NULL) {
        (void)look_up(symbol, &address, MEMORY_VERSION, 0, &found);
    }
    return address;
}

int ncclMemAlloc(void **data, size_t nbytes)
{
    wsync_cu_result_t (*allocate)(wsync_cu_ptr_t *, size_t);
    void *address = driver_function("cuMemAlloc");
    allocation_t *made;
    const int result = fake_begin("ncclMemAlloc");

    memcpy(&allocate, (const void *)&address, sizeof(allocate));
    if (result != WSYNC_NCCL_SUCCESS) {
        return result;
    }
    made = calloc(1, sizeof(*made));
    if (made == NULL || address == NULL ||
        allocate(&made->at, nbytes) != WSYNC_CU_SUCCESS) {
        free(made);
        return fake_refuse(WSYNC_NCCL_CUDA_ERROR, "no %zu bytes", nbytes);
    }
    fake_lock();
    made->next = allocations;
    allocations = made;
    fake_unlock();
    *data = (void *)(uintptr_t)made->at;
    return WSYNC_NCCL_SUCCESS;
}

int ncclMemFree(void *data)
{
    wsync_cu_result_t (*release)(wsync_cu_ptr_t);
    void *address = driver_function("cuMemFree");
    const int planned = fake_begin("ncclMemFree");
    allocation_t *found = NULL;

    memcpy(&release, (const void *)&address, sizeof(release));
    fake_lock();
    for (allocation_t **at = &allocations; *at != NULL; at = &(*at)->next) {
        if ((*at)->at == (wsync_cu_ptr_t)(uintptr_t)data) {
            found = *at;
            *at = found->next;
            break;
        }
    }
    fake_unlock();
    if (found == NULL || address == NULL) {
        return fake_misuse(WSYNC_NCCL_INVALID_ARGUMENT, "ncclMemFree: nothing was there");
    }
    free(found);
    return release((wsync_cu_ptr_t)(uintptr_t)data) == WSYNC_CU_SUCCESS
               ? planned
               : WSYNC_NCCL_CUDA_ERROR;
}

/* --- registrations ----------------------------------------------------------------------
 */

static int add_registration(struct wsync_nccl_comm *comm, const char *call, void *handle)
{
    fake_registration_t *made = calloc(1, sizeof(*made));

    (void)call;
    if (made == NULL) {
        return WSYNC_NCCL_SYSTEM_ERROR;
    }
    made->next = comm->registrations;
    comm->registrations = made;
    registrations++;
    memcpy(handle, &made, sizeof(made));
    return WSYNC_NCCL_SUCCESS;
}

static int remove_registration(struct wsync_nccl_comm *comm, const char *call, void *handle)
{
    const int planned = fake_begin(call);
    fake_registration_t *found = NULL;
    int result;

    fake_lock();
    result = fake_hold(comm, call, FAKE_FREE);
    if (result == WSYNC_NCCL_SUCCESS) {
        for (fake_registration_t **at = &comm->registrations; *at != NULL;
             at = &(*at)->next) {
            if ((void *)*at == handle) {
                found = *at;
                *at = found->next;
                registrations--;
                break;
            }
        }
        fake_let_go(comm);
        result = found != NULL ? planned
                               : fake_misuse(WSYNC_NCCL_INVALID_ARGUMENT,
                                             "%s: nothing was there", call);
        free(found);
    }
    fake_unlock();
    return result;
}

int ncclCommRegister(wsync_nccl_comm_t comm, void *data, size_t nbytes, void **handle)
{
    (void)data;
    (void)nbytes;
    return fake_change(comm, "ncclCommRegister", FAKE_MANAGE, add_registration, handle);
}

int ncclCommDeregister(wsync_nccl_comm_t comm, void *handle)
{
    return remove_registration(comm, "ncclCommDeregister", handle);
}

int ncclCommWindowRegister(wsync_nccl_comm_t comm, void *data, size_t nbytes,
                           wsync_nccl_window_t *window, int flags)
{
    if ((uintptr_t)data % WINDOW_ALIGNMENT != 0 || nbytes == 0 ||
        (flags & ~WSYNC_NCCL_WINDOW_SYMMETRIC) != 0) {
        return fake_refuse(WSYNC_NCCL_INVALID_ARGUMENT, "a window that is not aligned");
    }
    return fake_change(comm, "ncclCommWindowRegister", FAKE_MANAGE, add_registration,
                       window);
}

int ncclCommWindowDeregister(wsync_nccl_comm_t comm, wsync_nccl_window_t window)
{
    return remove_registration(comm, "ncclCommWindowDeregister", window);
}

/* --- communicators ----------------------------------------------------------------------
 */

static int add_all_to_all(struct wsync_nccl_comm *comm, const unsigned char *source,
                          const unsigned char *destination, const fake_offer_t *offer)
{
    int result = WSYNC_NCCL_SUCCESS;

    for (int i = 0; i < comm->rank_count && result == WSYNC_NCCL_SUCCESS; i++) {
        result = fake_add(comm, true, i, source + (size_t)i * offer->nbytes, offer);
        if (result == WSYNC_NCCL_SUCCESS) {
            result =
                fake_add(comm, false, i, destination + (size_t)i * offer->nbytes, offer);
        }
    }
    return result;
}

int ncclAlltoAll(const void *source, void *destination, size_t count, int type,
                 wsync_nccl_comm_t comm, wsync_cu_stream_t stream)
{
    fake_offer_t offer = {.kind = FAKE_ALL_TO_ALL};
    int result = fake_operation_begin(comm, stream, "ncclAlltoAll");

    if (result == WSYNC_NCCL_SUCCESS) {
        result = fake_measure(count, type, &offer.nbytes);
    }
    if (result == WSYNC_NCCL_SUCCESS) {
        offer.collective = ++comm->collectives;
        result = add_all_to_all(comm, source, destination, &offer);
    }
    return fake_operation_end(result);
}

static int revoke(struct wsync_nccl_comm *comm, const char *call, void *argument)
{
    const int *flags = argument;

    if (*flags != 0 || comm->revoked) {
        return fake_refuse(WSYNC_NCCL_INVALID_USAGE, "%s: flags, or twice", call);
    }
    atomic_store(&comm->stop, true);
    comm->revoked = true;
    return fake_set_busy(comm);
}

int ncclCommRevoke(wsync_nccl_comm_t comm, int flags)
{
    return fake_change(comm, "ncclCommRevoke", FAKE_FREE, revoke, &flags);
}

static int set_suspended(struct wsync_nccl_comm *comm, const char *call, void *argument)
{
    const bool *suspended = argument;

    if (comm->suspended == *suspended || atomic_load(&comm->ended) < comm->submitted) {
        return fake_misuse(WSYNC_NCCL_INVALID_USAGE, "%s: twice, or with work under way",
                           call);
    }
    comm->suspended = *suspended;
    atomic_fetch_add(&comm->world->members[comm->rank].turns, 1);
    if (comm->blocking) {
        return WSYNC_NCCL_SUCCESS;
    }
    comm->turning = true;
    return fake_set_busy(comm);
}

int ncclCommSuspend(wsync_nccl_comm_t comm, int flags)
{
    bool suspended = true;

    return flags != WSYNC_NCCL_SUSPEND_MEMORY
               ? WSYNC_NCCL_INVALID_ARGUMENT
               : fake_change(comm, "ncclCommSuspend", FAKE_MANAGE, set_suspended,
                             &suspended);
}

int ncclCommResume(wsync_nccl_comm_t comm)
{
    bool suspended = false;

    return fake_change(comm, "ncclCommResume", FAKE_MANAGE, set_suspended, &suspended);
}

#endif
