/* SPDX-License-Identifier: Apache-2.0
 * Memory: what another process can map. */
#include "device/cuda_lend.h"
#include "python/convert.h"
#include "python/device_types.h"

PyObject *wsync_py_memory_wrap(ModuleState *state, wsync_memory_t *memory)
{
    PyObject *self = wsync_py_alloc(state->type_Memory);

    if (self == NULL) {
        wsync_memory_destroy(memory);
        return NULL;
    }
    ((MemoryObject *)self)->memory = memory;
    return self;
}

static PyObject *memory_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"nbytes", "device", "control", NULL};
    ModuleState *state = wsync_py_type_state(type);
    wsync_py_device_arg_t device = {state, wsync_device_host()};
    wsync_memory_t *memory = NULL;
    wsync_error_t err = {0};
    wsync_status_t status;
    uint64_t nbytes;
    int control = 0;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&|O&p:Memory", names,
                                     wsync_py_convert_u64, &nbytes, wsync_py_convert_device,
                                     &device, &control)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        status = (control ? wsync_control_create : wsync_memory_create)(
            device.device, nbytes, &memory, &err);
    Py_END_ALLOW_THREADS
    return status == WSYNC_OK ? wsync_py_memory_wrap(state, memory)
                              : wsync_py_raise(state, &err);
}

static PyObject *memory_from_fd(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"fd", "nbytes", "device", NULL};
    ModuleState *state = wsync_py_state(module);
    wsync_py_device_arg_t device = {state, wsync_device_host()};
    wsync_memory_t *memory = NULL;
    wsync_error_t err = {0};
    wsync_status_t status;
    uint64_t nbytes;
    int fd;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iO&|O&:from_fd", names, &fd,
                                     wsync_py_convert_u64, &nbytes, wsync_py_convert_device,
                                     &device)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        status = wsync_memory_import(device.device, fd, nbytes, &memory, &err);
    Py_END_ALLOW_THREADS
    return status == WSYNC_OK ? wsync_py_memory_wrap(state, memory)
                              : wsync_py_raise(state, &err);
}

static PyObject *memory_borrow(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"fd", "device", NULL};
    ModuleState *state = wsync_py_state(module);
    wsync_py_device_arg_t device = {state, wsync_device_host()};
    wsync_memory_t *memory = NULL;
    wsync_error_t err = {0};
    wsync_status_t status;
    int fd;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "i|O&:borrow", names, &fd,
                                     wsync_py_convert_device, &device)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        status = wsync_memory_borrow(device.device, &fd, 1, &memory, &err);
    Py_END_ALLOW_THREADS
    return status == WSYNC_OK ? wsync_py_memory_wrap(state, memory)
                              : wsync_py_raise(state, &err);
}

static void memory_dealloc(PyObject *object)
{
    MemoryObject *self = (MemoryObject *)object;

    if (self->memory != NULL) {
        /* A driver may wait for its device, and that for a thread of this process. */
        Py_BEGIN_ALLOW_THREADS
            wsync_memory_destroy(self->memory);
        Py_END_ALLOW_THREADS
    }
    wsync_py_free(object);
}

static PyObject *memory_fileno(PyObject *object, PyObject *Py_UNUSED(unused))
{
    const MemoryObject *self = (MemoryObject *)object;
    const int fd = self->memory->fd;

    if (fd < 0) {
        return wsync_py_fail(wsync_py_state_of(object), WSYNC_ERR_STATE, "fileno",
                             "the memory is parked");
    }
    return PyLong_FromLong(fd);
}

WSYNC_PY_NUMBER_GETTER(memory_get_address, (uintptr_t)((MemoryObject *)self)->memory->data)
WSYNC_PY_NUMBER_GETTER(memory_get_nbytes, ((MemoryObject *)self)->memory->nbytes)

static int memory_getbuffer(PyObject *object, Py_buffer *view, int flags)
{
    const MemoryObject *self = (MemoryObject *)object;
    wsync_error_t err = {0};

    view->obj = NULL;
    if (self->memory->device != wsync_device_host()) {
        PyErr_SetString(PyExc_BufferError, "memory of a GPU has no buffer on the host");
        return -1;
    }
    if (wsync_memory_pin(self->memory, &err) != WSYNC_OK) {
        PyErr_SetString(PyExc_BufferError, err.message);
        return -1;
    }
    if (PyBuffer_FillInfo(view, object, self->memory->data,
                          (Py_ssize_t)self->memory->nbytes, self->memory->lent,
                          flags) < 0) {
        wsync_memory_unpin(self->memory);
        return -1;
    }
    return 0;
}

static void memory_releasebuffer(PyObject *object, Py_buffer *Py_UNUSED(view))
{
    const MemoryObject *self = (MemoryObject *)object;

    wsync_memory_unpin(self->memory);
}

static PyObject *memory_retire(PyObject *object, PyObject *Py_UNUSED(unused))
{
    return PyBool_FromLong(wsync_cuda_retire(((MemoryObject *)object)->memory));
}

static PyMethodDef memory_methods[] = {
    {"fileno", memory_fileno, METH_NOARGS, "fileno($self, /)\n--\n\n"},
    {"retire", memory_retire, METH_NOARGS, "retire($self, /)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef memory_getset[] = {
    {"address", memory_get_address, NULL, NULL, NULL},
    {"nbytes", memory_get_nbytes, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot memory_slots[] = {
    {Py_tp_doc, "Memory(nbytes, device=None, control=False)\n--\n\n"},
    {Py_tp_new, memory_new},
    {Py_tp_dealloc, memory_dealloc},
    {Py_tp_methods, memory_methods},
    {Py_tp_getset, memory_getset},
    {Py_bf_getbuffer, memory_getbuffer},
    {Py_bf_releasebuffer, memory_releasebuffer},
    {0, NULL},
};

static PyMethodDef memory_static_methods[] = {
    {"borrow", WSYNC_PY_KEYWORDS(memory_borrow), "borrow(fd, device=None)\n--\n\n"},
    {"from_fd", WSYNC_PY_KEYWORDS(memory_from_fd),
     "from_fd(fd, nbytes, device=None)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

const wsync_py_type_t wsync_py_type_Memory = {
    "wsync._core.Memory", sizeof(MemoryObject),  0,
    memory_slots,         memory_static_methods, NULL};
