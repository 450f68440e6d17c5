/* SPDX-License-Identifier: Apache-2.0
 * Modules and their kernels. */
#include <stdlib.h>
#include <string.h>

#include "device/kernel_table.h"
#include "device/quantise_table.h"
#include "fake.h"
#include "kernel_host.h"

/* Launches are at addresses where the host reaches what the device does.  A table of
 * addresses, of which those are filled in that are asked for. */
typedef struct table {
    const unsigned long long *device;
    unsigned long long *host; /* owned */
    size_t capacity;
} table_t;

static void *reach(unsigned long long at)
{
    return fake_reach((uintptr_t)at);
}

static void reach_entry(table_t *table, size_t index)
{
    if (index >= table->capacity) {
        const size_t capacity = 2 * index + 64;
        unsigned long long *host = realloc(table->host, capacity * sizeof(*host));

        if (host == NULL) {
            abort();
        }
        memset(host + table->capacity, 0, (capacity - table->capacity) * sizeof(*host));
        table->host = host;
        table->capacity = capacity;
    }
    if (table->host[index] == 0) {
        table->host[index] = (uintptr_t)reach(table->device[index]);
        if (fake_check_range("a kernel", (uintptr_t)table->device[index], 1, false) !=
            WSYNC_CU_SUCCESS) {
            abort();
        }
    }
}

static void quantise_tasks(unsigned grid, unsigned block, const void *parameters)
{
    wsync_quantise_args_t args = *(const wsync_quantise_args_t *)parameters;
    void *own[] = {&args};
    const wsync_quantise_task_t *tasks;
    table_t sources = {0};

    fake_lock();
    tasks = reach(args.tasks);
    sources.device = reach(args.sources);
    for (size_t i = args.first; i < args.first + args.count; i++) {
        reach_entry(&sources, tasks[i].source_buffer);
    }
    args.tasks = (uintptr_t)tasks;
    args.thread_starts = (uintptr_t)reach(args.thread_starts);
    args.sources = (uintptr_t)sources.host;
    args.image = (uintptr_t)reach(args.image);
    args.table = (uintptr_t)reach(args.table);
    args.scratch = (uintptr_t)reach(args.scratch);
    fake_unlock();
    (void)wsync_host_kernel_launch(WSYNC_QUANTISE_KERNEL_NAME, grid, block, own);
    free(sources.host);
}

static void copy_segments(unsigned grid, unsigned block, const void *parameters)
{
    wsync_kernel_args_t args = *(const wsync_kernel_args_t *)parameters;
    void *own[] = {&args};
    const wsync_segment_t *segments;
    table_t sources = {0};
    table_t destinations = {0};

    fake_lock();
    segments = reach(args.segments);
    sources.device = reach(args.sources);
    destinations.device = reach(args.destinations);
    for (size_t i = args.first; i < args.first + args.count; i++) {
        reach_entry(&sources, segments[i].source_buffer);
        reach_entry(&destinations, segments[i].destination_buffer);
    }
    args.segments = (uintptr_t)segments;
    args.tile_starts = (uintptr_t)reach(args.tile_starts);
    args.tile_index = (uintptr_t)reach(args.tile_index);
    args.sources = (uintptr_t)sources.host;
    args.destinations = (uintptr_t)destinations.host;
    fake_unlock();
    (void)wsync_host_kernel_launch(WSYNC_KERNEL_NAME, grid, block, own);
    free(sources.host);
    free(destinations.host);
}

static const fake_kernel_t kernels[FAKE_KERNELS] = {
    {WSYNC_KERNEL_NAME, copy_segments, WSYNC_KERNEL_BLOCK, sizeof(wsync_kernel_args_t)},
    {WSYNC_QUANTISE_KERNEL_NAME, quantise_tasks, WSYNC_QUANTISE_BLOCK,
     sizeof(wsync_quantise_args_t)},
};

wsync_cu_result_t fake_kernel_of(wsync_cu_function_t function,
                                 const struct wsync_cu_context *context,
                                 const fake_kernel_t **kernel)
{
    for (const struct wsync_cu_module *at = fake.modules; at != NULL; at = at->next) {
        if (function < at->functions || function >= at->functions + FAKE_KERNELS) {
            continue;
        }
        *kernel = function->kernel;
        return at->context == context ? WSYNC_CU_SUCCESS : WSYNC_CU_INVALID_CONTEXT;
    }
    return fake_refuse(WSYNC_CU_INVALID_HANDLE,
                       "cuLaunchKernel: no such kernel, or unloaded");
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
    for (size_t i = 0; i < FAKE_KERNELS; i++) {
        made->functions[i] = (struct wsync_cu_function){made, &kernels[i]};
    }
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
    const wsync_cu_result_t code = fake_enter("cuModuleGetFunction");

    if (code != WSYNC_CU_SUCCESS || module == NULL) {
        return code != WSYNC_CU_SUCCESS ? code : WSYNC_CU_INVALID_HANDLE;
    }
    for (size_t i = 0; i < FAKE_KERNELS; i++) {
        if (strcmp(name, kernels[i].name) == 0) {
            *function = &module->functions[i];
            return WSYNC_CU_SUCCESS;
        }
    }
    return WSYNC_CU_NOT_FOUND;
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
