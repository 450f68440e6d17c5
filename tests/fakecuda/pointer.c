/* SPDX-License-Identifier: Apache-2.0
 * What the driver tells of an address. */
#include <string.h>

#include "fake.h"

static unsigned type_of(const fake_range_t *range)
{
    if (range == NULL || (range->kind == FAKE_RESERVED && !fake.reserved)) {
        return fake.pageable && range == NULL ? WSYNC_CU_MEMORY_HOST : 0;
    }
    return range->kind == FAKE_HOST ? WSYNC_CU_MEMORY_HOST : WSYNC_CU_MEMORY_DEVICE;
}

/* Whether an address is in a range that begins there. */
static bool in(wsync_cu_ptr_t at, const void *begin, const fake_range_t *range)
{
    return at >= (uintptr_t)begin && at - (uintptr_t)begin < range->nbytes;
}

static void put(int attribute, void *value, const fake_range_t *range, wsync_cu_ptr_t at)
{
    const unsigned type = type_of(range);
    const bool known = range != NULL && type != 0;
    const unsigned long long buffer =
        known && range->kind != FAKE_RESERVED ? range->buffer : 0;
    const bool managed = false;
    const bool mapped = known && range->kind != FAKE_RESERVED;
    const bool by_host = known && range->kind == FAKE_HOST && in(at, range->host, range);
    const wsync_cu_ptr_t address = by_host     ? range->at + (at - (uintptr_t)range->host)
                                   : type != 0 ? at
                                               : 0;
    const bool legacy = known && range->kind == FAKE_ALLOCATED;
    const unsigned long long types =
        known && range->kind == FAKE_MAPPED ? (unsigned)range->physical->types : 0;

    switch (attribute) {
    case WSYNC_CU_POINTER_TYPE:
        memcpy(value, &type, sizeof(type));
        return;
    case WSYNC_CU_POINTER_DEVICE_ADDRESS:
        memcpy(value, &address, sizeof(address));
        return;
    case WSYNC_CU_POINTER_BUFFER:
        memcpy(value, &buffer, sizeof(buffer));
        return;
    case WSYNC_CU_POINTER_MANAGED:
        memcpy(value, &managed, sizeof(managed));
        return;
    case WSYNC_CU_POINTER_MAPPED:
        memcpy(value, &mapped, sizeof(mapped));
        return;
    case WSYNC_CU_POINTER_LEGACY_IPC:
        memcpy(value, &legacy, sizeof(legacy));
        return;
    case WSYNC_CU_POINTER_HANDLE_TYPES:
        memcpy(value, &types, sizeof(types));
        return;
    default:
        return;
    }
}

/* What lies at an address: memory, or else the reservation of the address. */
static const fake_range_t *find_range(wsync_cu_ptr_t at)
{
    const fake_range_t *reserved = NULL;

    for (const fake_range_t *range = fake.ranges; range != NULL; range = range->next) {
        if (range->kind != FAKE_GRAVE &&
            (in(at, (const void *)range->at, range) ||
             (range->kind == FAKE_HOST && in(at, range->host, range)))) {
            if (range->kind != FAKE_RESERVED) {
                return range;
            }
            reserved = range;
        }
    }
    return reserved;
}

wsync_cu_result_t fake_pointer_attributes(unsigned count, int *attributes, void **values,
                                          wsync_cu_ptr_t at)
{
    struct wsync_cu_context *context = NULL;
    const fake_range_t *range;
    const wsync_cu_result_t code = fake_enter_context("cuPointerGetAttributes", &context);

    if (code != WSYNC_CU_SUCCESS) {
        return code;
    }
    fake_lock();
    range = find_range(at);
    for (unsigned i = 0; i < count; i++) {
        put(attributes[i], values[i], range, at);
    }
    fake_unlock();
    return WSYNC_CU_SUCCESS;
}
