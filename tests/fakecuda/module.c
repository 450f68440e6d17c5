/* SPDX-License-Identifier: Apache-2.0
 * Modules, their kernels, and what a launch will touch. */
#include <stdlib.h>
#include <string.h>

#include "device/kernel_table.h"
#include "device/quantise_table.h"
#include "fake.h"
#include "kernel_host.h"

/* What a segment touches of one side, if `item_nbytes` is all that it touches of a row. */
static wsync_cu_result_t visit_side(const wsync_segment_t *segment, uintptr_t base,
                                    const long long stride[WSYNC_KERNEL_NDIM],
                                    unsigned long long row_nbytes, fake_visit_func_t visit,
                                    const void *state)
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
    return visit(state, low, high - low);
}

/* An entry of a table of addresses, and what it says. */
static wsync_cu_result_t visit_entry(unsigned long long table, unsigned index,
                                     uintptr_t *address, fake_visit_func_t visit,
                                     const void *state)
{
    const uintptr_t at = (uintptr_t)table + index * sizeof(unsigned long long);
    const wsync_cu_result_t code = visit(state, at, sizeof(unsigned long long));

    if (code == WSYNC_CU_SUCCESS) {
        *address = (uintptr_t)(*(const unsigned long long *)fake_reach(at));
    }
    return code;
}

static wsync_cu_result_t visit_segment(const wsync_kernel_args_t *args,
                                       const wsync_segment_t *segment,
                                       fake_visit_func_t visit, const void *state)
{
    uintptr_t source = 0;
    uintptr_t destination = 0;
    wsync_cu_result_t code =
        visit_entry(args->sources, segment->source_buffer, &source, visit, state);

    if (code == WSYNC_CU_SUCCESS) {
        code = visit_entry(args->destinations, segment->destination_buffer, &destination,
                           visit, state);
    }
    if (code == WSYNC_CU_SUCCESS) {
        code = visit_side(
            segment, source + (uintptr_t)segment->source_offset, segment->source_stride,
            segment->source_item_nbytes *
                (segment->kind == WSYNC_SEGMENT_FILL ? 1 : segment->row_count),
            visit, state);
    }
    if (code == WSYNC_CU_SUCCESS) {
        code =
            visit_side(segment, destination + (uintptr_t)segment->destination_offset,
                       segment->destination_stride,
                       segment->row_count * segment->destination_item_nbytes, visit, state);
    }
    return code;
}

/* Reads the tables as they are now: they must not change any more. */
static wsync_cu_result_t each_of_segments(const unsigned char *parameters,
                                          fake_visit_func_t visit, const void *state)
{
    wsync_kernel_args_t args;
    wsync_cu_result_t code;
    const wsync_segment_t *segments;

    memcpy(&args, parameters, sizeof(args));
    segments = fake_reach((uintptr_t)args.segments);
    code = visit(state, (uintptr_t)args.segments + args.first * sizeof(*segments),
                 args.count * sizeof(*segments));
    if (code == WSYNC_CU_SUCCESS) {
        code = visit(state, (uintptr_t)args.tile_starts + args.first * sizeof(unsigned),
                     (args.count + 1) * sizeof(unsigned));
    }
    if (code == WSYNC_CU_SUCCESS) {
        const unsigned *starts = fake_reach((uintptr_t)args.tile_starts);
        const unsigned low = starts[args.first] / WSYNC_TILE_GROUP;
        const unsigned high = (starts[args.first + args.count] - 1) / WSYNC_TILE_GROUP + 1;

        code = visit(state, (uintptr_t)args.tile_index + low * sizeof(unsigned),
                     (high - low + 1) * sizeof(unsigned));
    }
    for (unsigned i = 0; i < args.count && code == WSYNC_CU_SUCCESS; i++) {
        code = visit_segment(&args, &segments[args.first + i], visit, state);
    }
    return code;
}

/* `count` rows of a piece that begin `stride` bytes from each other. */
static wsync_cu_result_t visit_rows(uintptr_t at, unsigned long long count,
                                    unsigned long long stride,
                                    unsigned long long row_nbytes, fake_visit_func_t visit,
                                    const void *state)
{
    return visit(state, at, (size_t)((count - 1) * stride + row_nbytes));
}

/* Blocks that a piece meets in one dimension. */
static unsigned long long blocks_of(const wsync_quantise_cut_t *dim)
{
    return (dim->offset + dim->extent - 1) / dim->block + 1;
}

/* What a task touches of the weights. */
static wsync_cu_result_t visit_weights(const wsync_quantise_args_t *args,
                                       const wsync_quantise_task_t *task,
                                       fake_visit_func_t visit, const void *state)
{
    uintptr_t low = 0;
    uintptr_t high;
    const wsync_cu_result_t code =
        visit_entry(args->sources, task->source_buffer, &low, visit, state);

    if (code != WSYNC_CU_SUCCESS) {
        return code;
    }
    low += (uintptr_t)task->source_offset;
    high = low + task->item_nbytes;
    for (int d = 0; d < 2; d++) {
        const long long reach =
            (long long)(task->dims[d].extent - 1) * task->source_stride[d];

        *(reach < 0 ? &low : &high) += (uintptr_t)reach;
    }
    return visit(state, low, high - low);
}

/* What a task touches of a table of amaxes. */
static wsync_cu_result_t visit_amaxes(const wsync_quantise_args_t *args,
                                      const wsync_quantise_task_t *task,
                                      fake_visit_func_t visit, const void *state)
{
    const unsigned long long item = sizeof(float);
    wsync_cu_result_t code = WSYNC_CU_SUCCESS;

    if (task->entries != WSYNC_QUANTISE_ENTRIES_LOCAL) {
        const unsigned long long table =
            task->entries == WSYNC_QUANTISE_ENTRIES_TABLE ? args->table : args->scratch;

        code = visit_rows((uintptr_t)(table + task->entry * item),
                          blocks_of(&task->dims[0]), task->entry_stride * item,
                          blocks_of(&task->dims[1]) * item, visit, state);
    }
    if (code == WSYNC_CU_SUCCESS && task->overall != WSYNC_QUANTISE_NOWHERE &&
        args->mode != WSYNC_QUANTISE_MODE_SCRATCH) {
        code = visit(state, (uintptr_t)(args->table + task->overall * item), item);
    }
    return code;
}

/* What a task touches of the image. */
static wsync_cu_result_t visit_image(const wsync_quantise_args_t *args,
                                     const wsync_quantise_task_t *task,
                                     fake_visit_func_t visit, const void *state)
{
    const unsigned per_word = 8U * task->word_nbytes / task->code_bits;
    const unsigned long long rows = task->entries == WSYNC_QUANTISE_ENTRIES_LOCAL
                                        ? task->dims[0].extent
                                        : blocks_of(&task->dims[0]);
    const unsigned long long words = (task->dims[1].extent + per_word - 1) / per_word;
    const unsigned long long cols =
        task->halves != 0
            ? (2ULL * task->dims[1].extent + task->dims[1].block - 1) / task->dims[1].block
            : blocks_of(&task->dims[1]);
    wsync_cu_result_t code =
        visit_rows((uintptr_t)(args->image + task->codes), task->dims[0].extent,
                   task->codes_stride, words * task->word_nbytes, visit, state);

    if (code == WSYNC_CU_SUCCESS) {
        code = visit_rows((uintptr_t)(args->image + task->scales), rows,
                          task->scales_stride, cols * task->scale_nbytes, visit, state);
    }
    if (code == WSYNC_CU_SUCCESS && task->second != WSYNC_QUANTISE_NOWHERE) {
        code = visit(state, (uintptr_t)(args->image + task->second), sizeof(float));
    }
    return code;
}

static wsync_cu_result_t each_of_tasks(const unsigned char *parameters,
                                       fake_visit_func_t visit, const void *state)
{
    wsync_quantise_args_t args;
    wsync_cu_result_t code;
    const wsync_quantise_task_t *tasks;

    memcpy(&args, parameters, sizeof(args));
    tasks = fake_reach((uintptr_t)args.tasks);
    code = visit(state, (uintptr_t)args.tasks + args.first * sizeof(*tasks),
                 args.count * sizeof(*tasks));
    if (code == WSYNC_CU_SUCCESS) {
        code = visit(state, (uintptr_t)args.thread_starts + args.first * sizeof(unsigned),
                     (args.count + 1) * sizeof(unsigned));
    }
    for (unsigned i = args.first; i < args.first + args.count && code == WSYNC_CU_SUCCESS;
         i++) {
        code = visit_weights(&args, &tasks[i], visit, state);
        if (code == WSYNC_CU_SUCCESS) {
            code = visit_amaxes(&args, &tasks[i], visit, state);
        }
        if (code == WSYNC_CU_SUCCESS && args.mode == WSYNC_QUANTISE_MODE_CODES) {
            code = visit_image(&args, &tasks[i], visit, state);
        }
    }
    return code;
}

/* --- launches, at addresses where the host reaches what the device does ----------------
 */

/* A table of addresses, of which those are filled in that are asked for. */
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
    }
}

static void quantise_tasks(unsigned grid, unsigned block, void **parameters)
{
    wsync_quantise_args_t args = *(const wsync_quantise_args_t *)parameters[0];
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

static void copy_segments(unsigned grid, unsigned block, void **parameters)
{
    wsync_kernel_args_t args = *(const wsync_kernel_args_t *)parameters[0];
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
    {WSYNC_KERNEL_NAME,
     copy_segments,
     each_of_segments,
     WSYNC_KERNEL_BLOCK,
     1,
     {sizeof(wsync_kernel_args_t)}},
    {WSYNC_QUANTISE_KERNEL_NAME,
     quantise_tasks,
     each_of_tasks,
     WSYNC_QUANTISE_BLOCK,
     1,
     {sizeof(wsync_quantise_args_t)}},
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
        return at->context == context
                   ? WSYNC_CU_SUCCESS
                   : fake_refuse(WSYNC_CU_INVALID_CONTEXT,
                                 "cuLaunchKernel: a kernel of another context");
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
    fake_synchronize();
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
    fake_synchronize();
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
    return fake_refuse(WSYNC_CU_NOT_FOUND, "cuModuleGetFunction: %s", name);
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
