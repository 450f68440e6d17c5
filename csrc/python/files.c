/* SPDX-License-Identifier: Apache-2.0
 * reserve_file() and write_files(): the copies of a route with files for destinations. */
#include <stdlib.h>

#include "device/host_file_write.h"
#include "python/convert.h"
#include "python/device_types.h"
#include "python/route.h"

/* (name, descriptor, nbytes); the name is the tuple's. */
static int read_file(const void *Py_UNUSED(context), PyObject *object, size_t index,
                     void *item)
{
    wsync_file_t *file = item;

    if (!PyTuple_Check(object)) {
        PyErr_Format(PyExc_TypeError, "file %zu: expected (name, descriptor, nbytes)",
                     index);
        return -1;
    }
    return PyArg_ParseTuple(object, "siO&:write_files", &file->name, &file->fd,
                            wsync_py_convert_u64, &file->nbytes)
               ? 0
               : -1;
}

static PyObject *reserve_file(PyObject *module, PyObject *args)
{
    wsync_file_t file;
    wsync_error_t err = {0};
    wsync_status_t status;

    if (!PyArg_ParseTuple(args, "siO&:reserve_file", &file.name, &file.fd,
                          wsync_py_convert_u64, &file.nbytes)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        status = wsync_host_file_reserve(&file, &err);
    Py_END_ALLOW_THREADS
    return wsync_py_none(wsync_py_state(module), status, &err);
}

static PyObject *write_files(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"route", "first", "last", "sources", "files", NULL};
    ModuleState *state = wsync_py_state(module);
    PyObject *route_object;
    const BufferTableObject *sources;
    PyObject *sequence;
    wsync_py_items_t files;
    const wsync_route_t *route;
    const wsync_copy_t *copies = NULL;
    size_t count = 0;
    long long first;
    long long last;
    wsync_error_t err = {0};
    wsync_status_t status;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!LLO!O:write_files", keywords,
                                     state->type_Route, &route_object, &first, &last,
                                     state->type_BufferTable, &sources, &sequence) ||
        wsync_py_check_gpu(state, sources->gpu, wsync_device_host(), "write_files") < 0) {
        return NULL;
    }
    route = ((RouteObject *)route_object)->route;
    if (first < 0 || last < first || last > wsync_route_buffer_count(route)) {
        return PyErr_Format(
            PyExc_IndexError,
            "buffers %lld to %lld are not a range of the route's (%u in all)", first, last,
            wsync_route_buffer_count(route));
    }
    if (wsync_py_items_init(&files, sequence, sizeof(wsync_file_t), read_file, NULL) < 0) {
        return NULL;
    }
    /* the copies of consecutive buffers lie together */
    for (long long i = last; i-- > first;) {
        size_t more;

        copies = wsync_route_copies(route, (uint32_t)i, &more);
        count += more;
    }
    Py_BEGIN_ALLOW_THREADS
        status = wsync_host_file_write(copies, count, sources->spans, sources->count,
                                       files.items, files.count, &err);
    Py_END_ALLOW_THREADS
    wsync_py_items_fini(&files);
    return status == WSYNC_OK
               ? PyLong_FromUnsignedLongLong(wsync_copies_nbytes(copies, count))
               : wsync_py_raise(state, &err);
}

PyMethodDef wsync_py_functions_files[] = {
    {"reserve_file", reserve_file, METH_VARARGS,
     "reserve_file(name, descriptor, nbytes, /)\n--\n\n"},
    {"write_files", WSYNC_PY_KEYWORDS(write_files),
     "write_files(route, first, last, sources, files)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};
