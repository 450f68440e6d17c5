/* SPDX-License-Identifier: Apache-2.0
 * count_down(): counters that processes share, which are changed in one step. */
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "python/module.h"

/* One function per size of a counter. */
#define LOWER_FUNCTION(name, type)                                          \
    static bool name(_Atomic(type) *counter, long long least)               \
    {                                                                       \
        type found = atomic_load(counter);                                  \
                                                                            \
        while (found > least) {                                             \
            if (atomic_compare_exchange_weak(counter, &found, found - 1)) { \
                return true;                                                \
            }                                                               \
        }                                                                   \
        return false;                                                       \
    }

LOWER_FUNCTION(lower_32, int32_t)
LOWER_FUNCTION(lower_64, int64_t)

static PyObject *count_down(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer counter;
    long long least;
    bool lowered;

    if (!PyArg_ParseTuple(args, "w*L:count_down", &counter, &least)) {
        return NULL;
    }
    if ((counter.len != 4 && counter.len != 8) ||
        (uintptr_t)counter.buf % (uintptr_t)counter.len != 0) {
        PyErr_Format(PyExc_ValueError,
                     "expected an aligned counter of 4 or 8 bytes, not %zd bytes at %p",
                     counter.len, counter.buf);
        PyBuffer_Release(&counter);
        return NULL;
    }
    lowered =
        counter.len == 4 ? lower_32(counter.buf, least) : lower_64(counter.buf, least);
    PyBuffer_Release(&counter);
    return PyBool_FromLong(lowered);
}

PyMethodDef wsync_py_functions_count_down[] = {
    {"count_down", count_down, METH_VARARGS, "count_down(counter, least, /)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};
