/* SPDX-License-Identifier: Apache-2.0
 * IpcMemory: GPU memory that processes without wsync open. */
#include "device/cuda_ipc.h"

#include "python/convert.h"

typedef struct IpcMemoryObject {
    PyObject_HEAD
    wsync_cuda_ipc_t *memory; /* owned; NULL: closed */
    wsync_cu_ptr_t at;
    uint64_t nbytes;
    wsync_cu_ipc_t handle;
} IpcMemoryObject;

static PyObject *ipc_memory_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"ordinal", "nbytes", NULL};
    const wsync_cuda_device_t *device = NULL;
    wsync_cuda_ipc_t *memory = NULL;
    wsync_error_t err = {0};
    wsync_status_t status;
    IpcMemoryObject *self;
    uint64_t nbytes;
    int ordinal;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iO&:IpcMemory", names, &ordinal,
                                     wsync_py_convert_u64, &nbytes)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        status = wsync_cuda_device(ordinal, &device, &err);
        if (status == WSYNC_OK) {
            status = wsync_cuda_ipc_create(device, nbytes, &memory, &err);
        }
    Py_END_ALLOW_THREADS
    if (status != WSYNC_OK) {
        return wsync_py_raise(wsync_py_type_state(type), &err);
    }
    self = (IpcMemoryObject *)wsync_py_alloc(type);
    if (self == NULL) {
        wsync_cuda_ipc_destroy(memory);
        return NULL;
    }
    self->memory = memory;
    self->at = memory->at;
    self->nbytes = memory->nbytes;
    self->handle = memory->handle;
    return (PyObject *)self;
}

static void shut(IpcMemoryObject *self)
{
    wsync_cuda_ipc_t *memory = self->memory;

    self->memory = NULL;
    Py_BEGIN_ALLOW_THREADS
        wsync_cuda_ipc_destroy(memory);
    Py_END_ALLOW_THREADS
}

static void ipc_memory_dealloc(PyObject *object)
{
    if (((IpcMemoryObject *)object)->memory != NULL) {
        shut((IpcMemoryObject *)object);
    }
    wsync_py_free(object);
}

static PyObject *ipc_memory_close(PyObject *object, PyObject *Py_UNUSED(unused))
{
    shut((IpcMemoryObject *)object);
    Py_RETURN_NONE;
}

/* What it was, once it is closed. */
WSYNC_PY_NUMBER_GETTER(ipc_memory_get_address, ((IpcMemoryObject *)self)->at)
WSYNC_PY_NUMBER_GETTER(ipc_memory_get_nbytes, ((IpcMemoryObject *)self)->nbytes)

static PyObject *ipc_memory_get_handle(PyObject *object, void *Py_UNUSED(unused))
{
    const wsync_cu_ipc_t *handle = &((IpcMemoryObject *)object)->handle;

    return PyBytes_FromStringAndSize(handle->bytes, sizeof(handle->bytes));
}

static PyMethodDef ipc_memory_methods[] = {
    {"close", ipc_memory_close, METH_NOARGS, "close($self, /)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef ipc_memory_getset[] = {
    {"address", ipc_memory_get_address, NULL, NULL, NULL},
    {"nbytes", ipc_memory_get_nbytes, NULL, NULL, NULL},
    {"handle", ipc_memory_get_handle, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot ipc_memory_slots[] = {
    {Py_tp_doc, "IpcMemory(ordinal, nbytes)\n--\n\n"},
    {Py_tp_new, ipc_memory_new},
    {Py_tp_dealloc, ipc_memory_dealloc},
    {Py_tp_methods, ipc_memory_methods},
    {Py_tp_getset, ipc_memory_getset},
    {0, NULL},
};

const wsync_py_type_t wsync_py_type_IpcMemory = {
    "wsync._core.IpcMemory", sizeof(IpcMemoryObject), 0, ipc_memory_slots, NULL, NULL};
