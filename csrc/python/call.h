/* SPDX-License-Identifier: Apache-2.0
 * Methods that wait without the GIL, and the objects that have them: Exporter, Importer and
 * Exchange.  wsync_py_call does what these methods have in common: it reads the
 * arguments, marks the object and the stream as in use, runs a core function in slices
 * without the GIL, and makes the result. */
#ifndef WSYNC_PYTHON_CALL_H
#define WSYNC_PYTHON_CALL_H

#include <stdbool.h>
#include <stdint.h>

#include "core/plan/plan.h"
#include "ipc/session.h"
#include "python/module.h"

/* Begins an object whose core object is for one thread at a time.  Guarded by the GIL. */
typedef struct wsync_py_peer {
    PyObject_HEAD
    const char *name; /* of the type, for messages */
    void *core;       /* owned by the type's file */
    bool closed;
    bool busy; /* a call is under way, in another thread or below this one's check() */
    void (*release)(struct wsync_py_peer *peer); /* what close() does; once */
} wsync_py_peer_t;

/* Raises StateError and returns -1 if the object is closed or in use; else it is in use
 * until leave. */
int wsync_py_peer_enter(wsync_py_peer_t *peer);
void wsync_py_peer_leave(wsync_py_peer_t *peer);

/* The method close(): does nothing if the object is closed. */
PyObject *wsync_py_peer_close(PyObject *self, PyObject *unused);

/* The arguments and results of one call of a method. */
typedef struct wsync_py_call {
    void *core;
    /* arguments, by the names of their parameters */
    double timeout; /* s; the step is called once without it */
    PyObject *check;
    PyObject *ring;         /* Memory */
    PyObject *memory;       /* Memory */
    PyObject *plan;         /* Plan */
    PyObject *on;           /* Stream or None */
    wsync_stream_t *stream; /* of `on`; NULL: none */
    const char *text;
    Py_buffer manifest; /* or bindings */
    int64_t wait_round;
    uint64_t update;
    uint64_t value;
    uint32_t round;
    uint32_t rounds;
    int park;
    wsync_receipt_t receipt; /* tensors, nbytes, audit_ns; also a result */
    /* others, for the caller's own use */
    const void *data;
    void *made;
    size_t nbytes;
} wsync_py_call_t;

/* One core call of at most timeout_ms, without the GIL.  WSYNC_ERR_TIMEOUT has it called
 * again until call->timeout has passed. */
typedef wsync_status_t (*wsync_py_step_func_t)(wsync_py_call_t *call, int timeout_ms,
                                               wsync_error_t *err);

/* Makes the result of a step that went well, while the object is still in use: what it lets
 * go of may let other threads in, which could close the object. */
typedef PyObject *(*wsync_py_result_func_t)(PyObject *self, wsync_py_call_t *call);

/* Calls a step in slices of at most 50 ms with the GIL released, letting signals in and
 * calling call->check (a callable, None or NULL; it raises to end the wait) between them.
 * Returns 0, or -1 with an exception. */
int wsync_py_wait(ModuleState *state, wsync_py_step_func_t step, wsync_py_call_t *call);

/* Parameters of methods: each fills the field of the call that has its name. */
typedef enum wsync_py_parameter {
    WSYNC_PY_END,
    WSYNC_PY_TIMEOUT,
    WSYNC_PY_CHECK,
    WSYNC_PY_RING,
    WSYNC_PY_MEMORY,
    WSYNC_PY_BINDINGS,
    WSYNC_PY_PLAN,
    WSYNC_PY_STREAM,         /* or None */
    WSYNC_PY_ENQUEUE_STREAM, /* not None */
    WSYNC_PY_TEXT,
    WSYNC_PY_MANIFEST,
    WSYNC_PY_WAIT_ROUND,
    WSYNC_PY_UPDATE,
    WSYNC_PY_ROUND,
    WSYNC_PY_ROUNDS,
    WSYNC_PY_PARK,
    WSYNC_PY_TENSORS,
    WSYNC_PY_NBYTES,
    WSYNC_PY_AUDIT_NS,
    WSYNC_PY_PARAMETER_COUNT,
} wsync_py_parameter_t;

enum { WSYNC_PY_MAX_PARAMETERS = 5 };

typedef struct wsync_py_method {
    const char *name;
    wsync_py_step_func_t step;
    wsync_py_result_func_t give; /* NULL: None */
    wsync_py_parameter_t parameters[WSYNC_PY_MAX_PARAMETERS + 1];
    bool if_open; /* does nothing with a closed object, where others raise */
} wsync_py_method_t;

/* A method of an object that begins with a wsync_py_peer_t. */
PyObject *wsync_py_call(PyObject *self, PyObject *const *args, Py_ssize_t unnamed,
                        PyObject *names, const wsync_py_method_t *method);

/* The entry of a PyMethodDef for it. */
#define WSYNC_PY_CALLED(function) \
    ((PyCFunction)(void (*)(void))(function)), METH_FASTCALL | METH_KEYWORDS

/* Defines `function`, the PyCFunction of a method.  The last arguments are its
 * parameters. */
#define WSYNC_PY_CALL(function, name, step, give, ...) \
    WSYNC_PY_METHOD(function, name, step, give, false, __VA_ARGS__)

/* The same for one that does nothing with a closed object. */
#define WSYNC_PY_CALL_IF_OPEN(function, name, step, give, ...) \
    WSYNC_PY_METHOD(function, name, step, give, true, __VA_ARGS__)

#define WSYNC_PY_METHOD(function, name, step, give, if_open, ...)                        \
    static PyObject *function(PyObject *self, PyObject *const *args, Py_ssize_t unnamed, \
                              PyObject *names)                                           \
    {                                                                                    \
        static const wsync_py_method_t method = {                                        \
            name, step, give, {__VA_ARGS__}, if_open};                                   \
                                                                                         \
        return wsync_py_call(self, args, unnamed, names, &method);                       \
    }

/* wsync_py_wait, and then the result, with the object and the stream in use. */
PyObject *wsync_py_call_run(wsync_py_peer_t *peer, wsync_py_step_func_t step,
                            wsync_py_result_func_t give, wsync_py_call_t *call);

#endif
