/* SPDX-License-Identifier: Apache-2.0 */
#include "core/base/checksum.h"

#include "python/module.h"

static PyObject *checksum(PyObject *Py_UNUSED(module), PyObject *data)
{
    Py_buffer buffer;
    uint64_t sum;

    if (PyObject_GetBuffer(data, &buffer, PyBUF_SIMPLE) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        sum = wsync_checksum(buffer.buf, (size_t)buffer.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&buffer);
    return PyLong_FromUnsignedLongLong(sum);
}

PyMethodDef wsync_py_functions_checksum[] = {
    {"checksum", checksum, METH_O,
     "checksum(data, /)\n--\n\n"
     "64-bit checksum of a contiguous buffer (FNV-style over 8-byte words); 0 is never\n"
     "returned."},
    {NULL, NULL, 0, NULL},
};
