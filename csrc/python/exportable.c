/* SPDX-License-Identifier: Apache-2.0
 * Memory of GPUs that other processes can map, by functions of the form that torch calls
 * (torch.cuda.memory.CUDAPluggableAllocator), and why there was none. */
#include "device/cuda.h"

#include "python/convert.h"

#define EXPORT __attribute__((visibility("default")))

EXPORT void *wsync_exportable_alloc(ssize_t nbytes, int ordinal, wsync_cu_stream_t stream);
EXPORT void wsync_exportable_free(void *at, ssize_t nbytes, int ordinal,
                                  wsync_cu_stream_t stream);

/* Why the calling thread was last refused memory; OK if it has got some since.  The form
 * has no room for an error. */
static _Thread_local wsync_error_t refusal;

/* Neither function takes the GIL, with which torch's lock may be waited for.  Both can be
 * called by any thread, and in a fork, which gets nothing and gives nothing back. */
void *wsync_exportable_alloc(ssize_t nbytes, int ordinal, wsync_cu_stream_t stream)
{
    const wsync_cuda_device_t *device = NULL;
    wsync_cu_ptr_t at = 0;
    wsync_error_t err = {0};

    (void)stream; /* what has just been mapped is nobody's: there is nothing to wait for */
    if (wsync_cuda_device(ordinal, &device, &err) == WSYNC_OK) {
        (void)wsync_cuda_take(device, (uint64_t)nbytes, &at, &err);
    }
    refusal = err;
    return (void *)(uintptr_t)at;
}

void wsync_exportable_free(void *at, ssize_t nbytes, int ordinal, wsync_cu_stream_t stream)
{
    const wsync_cuda_device_t *device = NULL;

    if (at != NULL && wsync_cuda_device(ordinal, &device, NULL) == WSYNC_OK) {
        wsync_cuda_give(device, (wsync_cu_ptr_t)(uintptr_t)at, (uint64_t)nbytes, stream);
    }
}

static PyObject *exportable_check(PyObject *module, PyObject *args)
{
    ModuleState *state = wsync_py_state(module);
    const wsync_cuda_device_t *device = NULL;
    wsync_error_t err = {0};
    wsync_status_t status;
    int ordinal;

    if (!PyArg_ParseTuple(args, "i:exportable_check", &ordinal)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        status = wsync_cuda_device(ordinal, &device, &err);
    Py_END_ALLOW_THREADS
    return wsync_py_none(state, status, &err);
}

static PyObject *exportable_refusal(PyObject *Py_UNUSED(module),
                                    PyObject *Py_UNUSED(unused))
{
    return PyUnicode_FromString(refusal.status != WSYNC_OK ? refusal.message : "");
}

PyMethodDef wsync_py_functions_exportable[] = {
    {"exportable_check", exportable_check, METH_VARARGS,
     "exportable_check(ordinal, /)\n--\n\n"},
    {"exportable_refusal", exportable_refusal, METH_NOARGS, "exportable_refusal()\n--\n\n"},
    {NULL, NULL, 0, NULL},
};
