/* SPDX-License-Identifier: Apache-2.0
 * What the driver tells of an address. */
#include <string.h>

#include "fake.h"

static void put(int attribute, void *value, const fake_range_t *range, wsync_cu_ptr_t at)
{
    const unsigned type = range == NULL              ? 0
                          : range->kind == FAKE_HOST ? WSYNC_CU_MEMORY_HOST
                                                     : WSYNC_CU_MEMORY_DEVICE;
    const unsigned long long buffer = range != NULL ? range->buffer : 0;
    const wsync_cu_ptr_t address = range != NULL ? at : 0;

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
    default:
        return;
    }
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
    range = fake.ranges;
    while (range != NULL && (range->kind == FAKE_RESERVED || range->kind == FAKE_GRAVE ||
                             at < range->at || at - range->at >= range->nbytes)) {
        range = range->next;
    }
    for (unsigned i = 0; i < count; i++) {
        put(attributes[i], values[i], range, at);
    }
    fake_unlock();
    return WSYNC_CU_SUCCESS;
}
