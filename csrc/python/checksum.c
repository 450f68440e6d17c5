/* SPDX-License-Identifier: Apache-2.0 */
#include "core/base/checksum.h"

#include <stdlib.h>
#include <string.h>

#include "python/tensor_table.h"

enum {
    /* Of a tensor that is summed as a whole. */
    WHOLE_NBYTES = 1 << 20,
    /* Of others, so many runs of so many elements are. */
    RUN_COUNT = 128,
    RUN_LENGTH = 8,
};

static PyObject *checksum_bytes(const void *data, size_t nbytes)
{
    uint64_t sum;

    Py_BEGIN_ALLOW_THREADS
        sum = wsync_checksum(data, nbytes);
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLongLong(sum);
}

/* A buffer of a torch tensor (numpy) would mark its storage as one that cannot be resized.
 */
static PyObject *checksum_tensor(ModuleState *state, const TensorTableObject *table)
{
    if (wsync_py_table_readable(state, table) < 0) {
        return NULL;
    }
    if (table->count != 1 || table->gpu >= 0 ||
        table->rows[0].nbytes != table->rows[0].nbytes_spanned) {
        return wsync_py_fail(state, WSYNC_ERR_INVALID, "checksum",
                             "not a table of one contiguous tensor in host memory");
    }
    return checksum_bytes(table->rows[0].data, (size_t)table->rows[0].nbytes);
}

static PyObject *checksum(PyObject *module, PyObject *data)
{
    ModuleState *state = wsync_py_state(module);
    Py_buffer buffer;
    PyObject *sum;

    if (Py_TYPE(data) == (PyTypeObject *)state->type_TensorTable) {
        return checksum_tensor(state, (const TensorTableObject *)data);
    }
    if (PyObject_GetBuffer(data, &buffer, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    sum = checksum_bytes(buffer.buf, (size_t)buffer.len);
    PyBuffer_Release(&buffer);
    return sum;
}

/* Copies `count` elements from number `first` on, the last axis fastest. */
static void gather(const wsync_tensor_row_t *row, size_t item_nbytes, uint64_t first,
                   uint64_t count, unsigned char *to)
{
    int64_t index[WSYNC_MAX_NDIM] = {0};
    int64_t offset = 0;

    for (uint32_t i = row->ndim; i-- > 0;) {
        index[i] = (int64_t)(first % (uint64_t)row->shape[i]);
        first /= (uint64_t)row->shape[i];
        offset += index[i] * row->stride[i];
    }
    for (uint64_t k = 0; k < count; k++, to += item_nbytes) {
        memcpy(to, (const unsigned char *)row->data + offset * (int64_t)item_nbytes,
               item_nbytes);
        for (uint32_t i = row->ndim; i-- > 0;) {
            offset += row->stride[i];
            index[i]++;
            if (index[i] < row->shape[i]) {
                break;
            }
            offset -= index[i] * row->stride[i];
            index[i] = 0;
        }
    }
}

/* The checksum of a tensor in host memory, or of its sample; 0: no memory for that. */
static uint64_t sum_row(const wsync_tensor_row_t *row)
{
    const size_t item_nbytes = wsync_dtype_nbytes(row->dtype);
    const uint64_t count = row->nbytes / item_nbytes;
    const bool whole = row->nbytes <= WHOLE_NBYTES;
    const uint64_t run = whole ? count : RUN_LENGTH;
    const uint64_t runs = whole ? 1 : RUN_COUNT;
    unsigned char *sample;
    uint64_t sum;

    if (whole && row->nbytes == row->nbytes_spanned) {
        return wsync_checksum(row->data, (size_t)row->nbytes);
    }
    sample = malloc((size_t)(runs * run) * item_nbytes);
    if (sample == NULL) {
        return 0;
    }
    for (uint64_t i = 0; i < runs; i++) {
        const uint64_t first = whole ? 0 : i * (count - run) / (runs - 1);

        gather(row, item_nbytes, first, run, sample + i * run * item_nbytes);
    }
    sum = wsync_checksum(sample, (size_t)(runs * run) * item_nbytes);
    free(sample);
    return sum;
}

static PyObject *checksums(PyObject *module, PyObject *object)
{
    ModuleState *state = wsync_py_state(module);
    const TensorTableObject *table = (const TensorTableObject *)object;
    PyObject *sums;

    if (!Py_IS_TYPE(object, (PyTypeObject *)state->type_TensorTable)) {
        PyErr_SetString(PyExc_TypeError, "checksums: a TensorTable is wanted");
        return NULL;
    }
    if (wsync_py_table_readable(state, table) < 0) {
        return NULL;
    }
    sums = PyList_New(table->count);
    for (Py_ssize_t i = 0; sums != NULL && i < table->count; i++) {
        const wsync_tensor_row_t *row = &table->rows[i];
        PyObject *item;
        uint64_t sum = 0;

        if (!row->on_gpu) {
            Py_BEGIN_ALLOW_THREADS
                sum = sum_row(row);
            Py_END_ALLOW_THREADS
        }
        item =
            sum != 0 || row->on_gpu ? PyLong_FromUnsignedLongLong(sum) : PyErr_NoMemory();
        if (item == NULL || PyList_SetItem(sums, i, item) < 0) {
            Py_CLEAR(sums);
        }
    }
    return sums;
}

PyMethodDef wsync_py_functions_checksum[] = {
    {"checksum", checksum, METH_O, "checksum(data, /)\n--\n\n"},
    {"checksums", checksums, METH_O, "checksums(table, /)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};
