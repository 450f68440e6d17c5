/* SPDX-License-Identifier: Apache-2.0 */
#include "core/base/checksum.h"

#include "python/tensor_table.h"

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

PyMethodDef wsync_py_functions_checksum[] = {
    {"checksum", checksum, METH_O, "checksum(data, /)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};
