/* SPDX-License-Identifier: Apache-2.0
 * IpcMemory: GPU memory that processes without wsync open. */
#include "device/cuda_ipc.h"

#include "python/convert.h"

typedef struct IpcMemoryObject {
    PyObject_HEAD
    wsync_cuda_ipc_t *memory; /* owned; NULL: closed */
} IpcMemoryObject;

static PyObject *ipc_memory_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"ordinal", "nbytes", NULL};
    const wsync_cuda_device_t *device = NULL;
    wsync_cuda_ipc_t *memory = NULL;
    wsync_error_t err = {0};
    wsync_status_t status;
    PyObject *self;
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
    self = wsync_py_alloc(type);
    if (self == NULL) {
        wsync_cuda_ipc_destroy(memory);
        return NULL;
    }
    ((IpcMemoryObject *)self)->memory = memory;
    return self;
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

/* NULL with StateError set if it is closed. */
static const wsync_cuda_ipc_t *get_memory(PyObject *object)
{
    const wsync_cuda_ipc_t *memory = ((IpcMemoryObject *)object)->memory;

    if (memory == NULL) {
        (void)wsync_py_fail(wsync_py_state_of(object), WSYNC_ERR_STATE, "IpcMemory",
                            "the memory is closed");
    }
    return memory;
}

static PyObject *ipc_memory_get_address(PyObject *object, void *Py_UNUSED(unused))
{
    const wsync_cuda_ipc_t *memory = get_memory(object);

    return memory != NULL ? PyLong_FromUnsignedLongLong(memory->at) : NULL;
}

static PyObject *ipc_memory_get_nbytes(PyObject *object, void *Py_UNUSED(unused))
{
    const wsync_cuda_ipc_t *memory = get_memory(object);

    return memory != NULL ? PyLong_FromUnsignedLongLong(memory->nbytes) : NULL;
}

static PyObject *ipc_memory_get_handle(PyObject *object, void *Py_UNUSED(unused))
{
    const wsync_cuda_ipc_t *memory = get_memory(object);

    return memory != NULL ? PyBytes_FromStringAndSize(memory->handle.bytes,
                                                      sizeof(memory->handle.bytes))
                          : NULL;
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
