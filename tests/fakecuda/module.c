/* SPDX-License-Identifier: Apache-2.0
 * Modules, their kernels, and what a launch will touch. */
#include <stdlib.h>
#include <string.h>

#include "device/kernel_table.h"
#include "fake.h"
#include "kernel_host.h"

/* Writes value to count words: what tests launch where there is no other kernel. */
static void fill_words(unsigned grid, unsigned block, void **parameters)
{
    uint32_t *words = *(uint32_t **)parameters[0];
    const uint32_t value = *(const uint32_t *)parameters[1];
    const uint32_t count = *(const uint32_t *)parameters[2];

    (void)grid;
    (void)block;
    for (uint32_t i = 0; i < count; i++) {
        words[i] = value;
    }
}

static wsync_cu_result_t check_words(const unsigned char *parameters)
{
    uint32_t count;
    uintptr_t words;

    memcpy(&words, parameters, sizeof(words));
    memcpy(&count, parameters + 32, sizeof(count));
    return fake_check_range("cuLaunchKernel", words, count * sizeof(uint32_t), false);
}

/* What a segment touches of one side, if `item_nbytes` is all that it touches of a row. */
static wsync_cu_result_t check_side(const wsync_segment_t *segment, uintptr_t base,
                                    const long long stride[WSYNC_KERNEL_NDIM],
                                    unsigned long long row_nbytes)
{
    unsigned long long rows = segment->row_total;
    uintptr_t low = base;
    uintptr_t high = base + row_nbytes;

    for (unsigned d = 0; d < segment->ndim; d++) {
        const unsigned long long extent =
            d + 1U < segment->ndim ? segment->extent[d].value : rows;
        const long long reach = (long long)(extent - 1) * stride[d];

        *(reach < 0 ? &low : &high) += (uintptr_t)reach;
        rows /= extent;
    }
    return fake_check_range("cuLaunchKernel", low, high - low, false);
}

/* Reads the tables as they are now: they must not change any more. */
static wsync_cu_result_t check_segments(const unsigned char *parameters)
{
    wsync_kernel_args_t args;
    wsync_cu_result_t code;
    const wsync_segment_t *segments;
    const unsigned long long *sources;
    const unsigned long long *destinations;

    memcpy(&args, parameters, sizeof(args));
    segments = (const wsync_segment_t *)(uintptr_t)args.segments;
    sources = (const unsigned long long *)(uintptr_t)args.sources;
    destinations = (const unsigned long long *)(uintptr_t)args.destinations;
    code = fake_check_range("cuLaunchKernel", (uintptr_t)args.segments,
                            (args.first + args.count) * sizeof(*segments), false);
    for (unsigned i = args.first; i < args.first + args.count && code == WSYNC_CU_SUCCESS;
         i++) {
        const wsync_segment_t *segment = &segments[i];
        const uintptr_t source =
            (uintptr_t)(sources[segment->source_buffer] + segment->source_offset);
        const uintptr_t destination =
            (uintptr_t)(destinations[segment->destination_buffer] +
                        segment->destination_offset);

        code =
            check_side(segment, source, segment->source_stride,
                       segment->source_item_nbytes *
                           (segment->kind == WSYNC_SEGMENT_FILL ? 1 : segment->row_count));
        if (code == WSYNC_CU_SUCCESS) {
            code = check_side(segment, destination, segment->destination_stride,
                              segment->row_count * segment->destination_item_nbytes);
        }
    }
    return code;
}

static void copy_segments(unsigned grid, unsigned block, void **parameters)
{
    (void)wsync_host_kernel_launch(WSYNC_KERNEL_NAME, grid, block, parameters);
}

const fake_kernel_t *fake_kernel_find(const char *name)
{
    static const fake_kernel_t kernels[] = {
        {WSYNC_KERNEL_NAME,
         copy_segments,
         check_segments,
         1,
         {sizeof(wsync_kernel_args_t)}},
        {"fake_fill",
         fill_words,
         check_words,
         3,
         {sizeof(void *), sizeof(uint32_t), sizeof(uint32_t)}},
    };

    for (size_t i = 0; i < sizeof(kernels) / sizeof(kernels[0]); i++) {
        if (strcmp(name, kernels[i].name) == 0) {
            return &kernels[i];
        }
    }
    return NULL;
}

wsync_cu_result_t fake_module_load(wsync_cu_module_t *module, const void *image)
{
    struct wsync_cu_context *context = NULL;
    struct wsync_cu_module *made;
    const wsync_cu_result_t code = fake_enter_context("cuModuleLoadData", &context);

    if (code != WSYNC_CU_SUCCESS) {
        return code;
    }
    made = image != NULL ? calloc(1, sizeof(*made)) : NULL;
    if (made == NULL) {
        return WSYNC_CU_INVALID_VALUE;
    }
    made->context = context;
    fake_lock();
    made->next = fake.modules;
    fake.modules = made;
    fake_unlock();
    *module = made;
    return WSYNC_CU_SUCCESS;
}

wsync_cu_result_t fake_module_unload(wsync_cu_module_t module)
{
    struct wsync_cu_context *context = NULL;
    wsync_cu_result_t code = fake_enter_return("cuModuleUnload", &context);

    if (code != WSYNC_CU_SUCCESS) {
        return code;
    }
    code = WSYNC_CU_INVALID_HANDLE;
    fake_lock();
    for (struct wsync_cu_module **at = &fake.modules; *at != NULL; at = &(*at)->next) {
        if (*at == module) {
            *at = module->next;
            free(module);
            code = WSYNC_CU_SUCCESS;
            break;
        }
    }
    fake_unlock();
    return fake_leave(code);
}

wsync_cu_result_t fake_module_function(wsync_cu_function_t *function,
                                       wsync_cu_module_t module, const char *name)
{
    const fake_kernel_t *kernel;
    const wsync_cu_result_t code = fake_enter("cuModuleGetFunction");

    if (code != WSYNC_CU_SUCCESS || module == NULL) {
        return code != WSYNC_CU_SUCCESS ? code : WSYNC_CU_INVALID_HANDLE;
    }
    kernel = fake_kernel_find(name);
    if (kernel == NULL) {
        return fake_refuse(WSYNC_CU_NOT_FOUND, "cuModuleGetFunction: %s", name);
    }
    /* Opaque to callers, who only hand it back. */
    memcpy(function, &kernel, sizeof(kernel));
    return WSYNC_CU_SUCCESS;
}

wsync_cu_result_t fake_occupancy(int *blocks, wsync_cu_function_t function, int threads,
                                 size_t shared_nbytes)
{
    const wsync_cu_result_t code =
        fake_enter("cuOccupancyMaxActiveBlocksPerMultiprocessor");

    (void)shared_nbytes;
    *blocks = 2;
    return code == WSYNC_CU_SUCCESS && (function == NULL || threads <= 0)
               ? WSYNC_CU_INVALID_VALUE
               : code;
}
