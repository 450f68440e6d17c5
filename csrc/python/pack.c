/* SPDX-License-Identifier: Apache-2.0
 * pack(): fills a flat buffer from many tensors. */
#include <stdlib.h>

#include "core/copy.h"
#include "device/host_copy.h"
#include "python/call.h"
#include "python/convert.h"
#include "python/device_types.h"
#include "python/tensor_table.h"

typedef struct packing {
    const TensorTableObject *table; /* borrowed */
    size_t count;                   /* of tensors */
    wsync_py_items_t offsets;       /* uint64_t, one a tensor */
    wsync_span_t *sources;          /* owned; one a tensor */
    wsync_copies_t copies;          /* owned */
    wsync_span_t destination;
} packing_t;

static void packing_fini(packing_t *packing)
{
    wsync_py_items_fini(&packing->offsets);
    free(packing->sources);
    wsync_copies_fini(&packing->copies);
}

static wsync_status_t append_tensor(packing_t *packing, size_t index, wsync_error_t *err)
{
    const wsync_tensor_row_t *row = &packing->table->rows[index];
    const int64_t item = (int64_t)wsync_dtype_nbytes(row->dtype);
    wsync_place_t source = {.buffer = (uint32_t)index, .dtype = row->dtype};
    const uint64_t *offsets = packing->offsets.items;
    wsync_place_t destination = {.dtype = row->dtype, .offset = offsets[index]};
    int64_t stride = item;

    if (row->nbytes == 0) {
        return WSYNC_OK;
    }
    if (row->nbytes > packing->destination.nbytes) { /* also keeps the strides below 2^63 */
        return wsync_fail(err, WSYNC_ERR_INVALID, 0, "pack",
                          "tensor %zu has %llu bytes, but the buffer has %llu", index,
                          (unsigned long long)row->nbytes,
                          (unsigned long long)packing->destination.nbytes);
    }
    for (unsigned i = WSYNC_MAX_NDIM; i-- > 0;) {
        /* torch lets any stride stand beside an extent of 1 */
        source.stride[i] = row->shape[i] > 1 ? row->stride[i] * item : 0;
        destination.stride[i] = stride;
        stride *= row->shape[i];
    }
    return wsync_copies_append(&packing->copies, row->shape, &source, &destination, err);
}

/* Without the GIL. */
static wsync_status_t packing_plan(packing_t *packing, wsync_error_t *err)
{
    for (size_t i = 0; i < packing->count; i++) {
        const wsync_tensor_row_t *row = &packing->table->rows[i];

        packing->sources[i] = (wsync_span_t){row->data, row->nbytes_spanned};
        if (append_tensor(packing, i, err) != WSYNC_OK) {
            return err->status;
        }
    }
    return wsync_copies_check(packing->copies.items, packing->copies.count,
                              packing->sources, packing->count, &packing->destination, 1,
                              err);
}

static int read_offset(const void *Py_UNUSED(context), PyObject *object,
                       size_t Py_UNUSED(index), void *item)
{
    return wsync_py_convert_u64(object, item) ? 0 : -1;
}

static int read_offsets(ModuleState *state, packing_t *packing, PyObject *sequence)
{
    packing->count = (size_t)packing->table->count;
    if (wsync_py_items_init(&packing->offsets, sequence, sizeof(uint64_t), read_offset,
                            NULL) < 0) {
        return -1;
    }
    if (packing->offsets.count != packing->count) {
        (void)wsync_py_fail(state, WSYNC_ERR_INVALID, "pack", "%zu tensors but %zu offsets",
                            packing->count, packing->offsets.count);
        return -1;
    }
    packing->sources = calloc(packing->count + 1, sizeof(*packing->sources));
    if (packing->sources == NULL) {
        (void)PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static PyObject *pack(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"tensors", "address", "nbytes", "offsets", NULL};
    ModuleState *state = wsync_py_state(module);
    packing_t packing = {0};
    wsync_error_t err = {0};
    wsync_status_t status;
    PyObject *offsets = NULL;
    PyObject *result = NULL;

    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O!O&O&O:pack", keywords, state->type_TensorTable, &packing.table,
            wsync_py_convert_address, &packing.destination.data, wsync_py_convert_u64,
            &packing.destination.nbytes, &offsets) ||
        wsync_py_table_readable(state, packing.table) < 0 ||
        wsync_py_check_gpu(state, packing.table->gpu, wsync_device_host(), "pack") < 0 ||
        read_offsets(state, &packing, offsets) < 0) {
        goto cleanup;
    }
    Py_BEGIN_ALLOW_THREADS
        status = packing_plan(&packing, &err);
        if (status == WSYNC_OK) {
            wsync_host_copy_run(packing.copies.items, packing.copies.count, packing.sources,
                                &packing.destination);
        }
    Py_END_ALLOW_THREADS
    result = wsync_py_none(state, status, &err);

cleanup:
    packing_fini(&packing);
    return result;
}

PyMethodDef wsync_py_functions_pack[] = {
    {"pack", WSYNC_PY_KEYWORDS(pack), "pack(tensors, address, nbytes, offsets)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};
