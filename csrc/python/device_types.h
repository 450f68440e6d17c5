/* SPDX-License-Identifier: Apache-2.0
 * Device, Memory, Event, Stream and BufferTable, as other files of csrc/python use them.
 * ModuleState.type_<name> is the type of an object; all five are final. */
#ifndef WSYNC_PYTHON_DEVICE_TYPES_H
#define WSYNC_PYTHON_DEVICE_TYPES_H

#include "python/module.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/copy.h"
#include "device/cuda_spans.h"

typedef struct MemoryObject {
    PyObject_HEAD
    wsync_memory_t *memory; /* owned; never NULL, mapped as long as the object lives */
} MemoryObject;

typedef struct EventObject {
    PyObject_HEAD
    MemoryObject *memory; /* owned */
    wsync_event_t event;
} EventObject;

/* Immutable. */
typedef struct BufferTableObject {
    PyObject_HEAD
    size_t count;
    wsync_span_t *spans;        /* owned */
    wsync_cuda_ranges_t ranges; /* owned; of `of`: what the spans on a GPU lie in */
    uint64_t id;                /* that no other table of the process has had */
    int gpu;         /* ordinal of the GPU that holds some of the spans; -1: none known */
    bool resident;   /* it holds all of them, as the driver or wsync itself has told */
    PyObject *owner; /* owned; keeps the spans' memory alive; may be NULL */
} BufferTableObject;

typedef struct stream_hold {
    uint64_t mark;
    PyObject *owner;
} stream_hold_t;

typedef struct StreamObject {
    PyObject_HEAD
    const wsync_device_t *device;
    wsync_stream_t *stream;   /* owned; NULL once closed */
    wsync_memory_t *progress; /* owned; word 0 is the last mark that the stream passed */
    uint64_t mark;            /* the last one that was given to be recorded */
    unsigned unmarked;        /* batches that were enqueued after it */
    stream_hold_t *holds;     /* owned, marks ascending */
    size_t hold_count;
    size_t hold_capacity;
    PyObject *labels; /* owned list of (index, phase) of the batches to be noted, or NULL */
    unsigned users;   /* calls that run without the GIL */
    bool closing;     /* close() is one of them */
} StreamObject;

enum { WSYNC_PY_UUID_NBYTES = 48 };
/* "GPU-" and the digits in groups, as nvidia-smi writes a GPU's UUID; "" for the host. */
void wsync_py_uuid_format(const uint8_t *uuid, char text[WSYNC_PY_UUID_NBYTES]);

/* "O&" converter to const wsync_device_t *: a Device, or None for the host.  Needs the
 * module state beside it, so the argument is a wsync_py_device_arg_t. */
typedef struct wsync_py_device_arg {
    const ModuleState *state;
    const wsync_device_t *device;
} wsync_py_device_arg_t;
int wsync_py_convert_device(PyObject *object, void *argument);

PyObject *wsync_py_device_wrap(ModuleState *state, const wsync_device_t *device);

/* A Memory object; memory is moved into it, also on failure. */
PyObject *wsync_py_memory_wrap(ModuleState *state, wsync_memory_t *memory);

/* A BufferTable of memory of a device; spans are copied, owner (NULL allowed) gets a new
 * reference. */
PyObject *wsync_py_buffers_create(ModuleState *state, const wsync_device_t *device,
                                  const wsync_span_t *spans, size_t count, PyObject *owner);

/* Between these two the stream cannot be closed and may be used without the GIL.  None
 * gives NULL.  enter raises and returns -1 if the object is neither, or closed. */
int wsync_py_stream_enter_any(ModuleState *state, PyObject *object,
                              wsync_stream_t **stream);
void wsync_py_stream_leave_any(PyObject *object);

/* Raises InvalidArgumentError and returns -1 if memory lies on a GPU (ordinal `gpu`; -1:
 * not known) other than the device that is to copy it: neither the host's threads nor
 * another GPU can read it. */
int wsync_py_check_gpu(ModuleState *state, int gpu, const wsync_device_t *device,
                       const char *call);

#endif
