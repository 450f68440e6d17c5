/* SPDX-License-Identifier: Apache-2.0
 * Plan: what every rank does in every round. */
#include "python/plan.h"

#include <stdbool.h>
#include <stdlib.h>

#include "python/convert.h"
#include "python/layout.h"

/* A specification and what it borrows. */
typedef struct plan_spec {
    wsync_plan_spec_t spec;
    wsync_py_items_t destinations;
    wsync_py_items_t workers;
    wsync_py_items_t hosts;
} plan_spec_t;

/* --- arguments ------------------------------------------------------------------------ */

static int read_destination(const void *context, PyObject *object, size_t index, void *item)
{
    const ModuleState *state = context;
    wsync_destination_t *destination = item;
    PyObject *layout;
    int whole;

    if (!PyTuple_Check(object)) {
        PyErr_Format(PyExc_TypeError, "destination %zu: expected (layout, whole), not %R",
                     index, object);
        return -1;
    }
    if (!PyArg_ParseTuple(object, "O!p;destination: (layout, whole)", state->type_Layout,
                          &layout, &whole)) {
        return -1;
    }
    *destination = (wsync_destination_t){((LayoutObject *)layout)->layout, whole != 0};
    return 0;
}

static int read_worker(const void *Py_UNUSED(context), PyObject *object, size_t index,
                       void *item)
{
    wsync_worker_t *worker = item;
    long long destination;
    long long home;

    if (!PyTuple_Check(object)) {
        PyErr_Format(PyExc_TypeError, "worker %zu: expected (destination, home), not %R",
                     index, object);
        return -1;
    }
    if (!PyArg_ParseTuple(object, "LL;worker: (destination, home)", &destination, &home) ||
        wsync_py_read_u32(destination, "destination", &worker->destination) < 0) {
        return -1;
    }
    return wsync_py_read_u32(home, "home", &worker->home);
}

static int read_host(const void *Py_UNUSED(context), PyObject *object,
                     size_t Py_UNUSED(index), void *item)
{
    const long long host = PyLong_AsLongLong(object);

    return host == -1 && PyErr_Occurred() ? -1 : wsync_py_read_u32(host, "host", item);
}

static void spec_fini(plan_spec_t *parsed)
{
    wsync_py_items_fini(&parsed->destinations);
    wsync_py_items_fini(&parsed->workers);
    wsync_py_items_fini(&parsed->hosts);
}

static int spec_init(ModuleState *state, PyObject *args, PyObject *kwargs,
                     plan_spec_t *parsed)
{
    static char *keywords[] = {"source",      "destinations", "workers",     "hosts",
                               "rank",        "round_nbytes", "ring_nbytes", "send_nbytes",
                               "recv_nbytes", "rounds_grow",  NULL};
    wsync_plan_spec_t *spec = &parsed->spec;
    PyObject *source;
    PyObject *sequences[3];
    long long rank;
    int grow = 0;

    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O!OOOL|$O&O&O&O&p:Plan", keywords, state->type_Layout, &source,
            &sequences[0], &sequences[1], &sequences[2], &rank, wsync_py_convert_u64,
            &spec->round_nbytes, wsync_py_convert_u64, &spec->ring_nbytes,
            wsync_py_convert_u64, &spec->send_nbytes, wsync_py_convert_u64,
            &spec->recv_nbytes, &grow) ||
        wsync_py_read_u32(rank, "rank", &spec->rank) < 0 ||
        wsync_py_items_init(&parsed->destinations, sequences[0],
                            sizeof(wsync_destination_t), read_destination, state) < 0 ||
        wsync_py_items_init(&parsed->workers, sequences[1], sizeof(wsync_worker_t),
                            read_worker, NULL) < 0 ||
        wsync_py_items_init(&parsed->hosts, sequences[2], sizeof(uint32_t), read_host,
                            NULL) < 0) {
        return -1;
    }
    spec->source = ((LayoutObject *)source)->layout;
    spec->destinations = parsed->destinations.items;
    spec->destination_count = (uint32_t)parsed->destinations.count;
    spec->workers = parsed->workers.items;
    spec->worker_count = (uint32_t)parsed->workers.count;
    spec->hosts = parsed->hosts.items;
    spec->rank_count = (uint32_t)parsed->hosts.count;
    spec->rounds_grow = grow != 0;
    return 0;
}

/* --- life ----------------------------------------------------------------------------- */

static PyObject *plan_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    ModuleState *state = wsync_py_type_state(type);
    plan_spec_t parsed = {.spec = {0}};
    PlanObject *self = NULL;
    wsync_error_t err = {0};
    wsync_status_t status;

    if (spec_init(state, args, kwargs, &parsed) < 0) {
        goto cleanup;
    }
    self = (PlanObject *)wsync_py_alloc(type);
    if (self == NULL) {
        goto cleanup;
    }
    self->id = wsync_py_new_id();
    Py_BEGIN_ALLOW_THREADS
        status = wsync_plan_create(&parsed.spec, &self->plan, &err);
    Py_END_ALLOW_THREADS
    if (status != WSYNC_OK) {
        Py_CLEAR(self);
        (void)wsync_py_raise(state, &err);
    }

cleanup:
    spec_fini(&parsed);
    return (PyObject *)self;
}

static void plan_dealloc(PyObject *self)
{
    wsync_plan_destroy(((PlanObject *)self)->plan);
    wsync_py_free(self);
}

/* --- reading -------------------------------------------------------------------------- */

static const wsync_plan_t *plan_of(PyObject *self)
{
    return ((PlanObject *)self)->plan;
}

static int read_u32_index(PyObject *object, uint32_t count, const char *what,
                          uint32_t *result)
{
    size_t index;

    if (wsync_py_read_index(object, count, what, &index) < 0) {
        return -1;
    }
    *result = (uint32_t)index;
    return 0;
}

static int read_round(PyObject *self, PyObject *object, uint32_t *round)
{
    return read_u32_index(object, wsync_plan_round_count(plan_of(self)), "round", round);
}

static int read_worker_index(PyObject *self, PyObject *object, uint32_t *worker)
{
    return read_u32_index(object, wsync_plan_worker_count(plan_of(self)), "worker", worker);
}

WSYNC_PY_NUMBER_GETTER(plan_round_count, wsync_plan_round_count(plan_of(self)))
WSYNC_PY_NUMBER_GETTER(plan_round_nbytes, wsync_plan_round_nbytes(plan_of(self)))
WSYNC_PY_NUMBER_GETTER(plan_send_nbytes, wsync_plan_send_nbytes(plan_of(self)))
WSYNC_PY_NUMBER_GETTER(plan_recv_nbytes, wsync_plan_recv_nbytes(plan_of(self)))
WSYNC_PY_NUMBER_GETTER(plan_fingerprint, wsync_plan_fingerprint(plan_of(self)))

static PyObject *plan_unused(PyObject *self, void *Py_UNUSED(closure))
{
    size_t count;
    const uint32_t *unused = wsync_plan_unused(plan_of(self), &count);
    PyObject *list = PyList_New((Py_ssize_t)count);

    for (size_t i = 0; list != NULL && i < count; i++) {
        wsync_py_list_put(&list, i, PyLong_FromUnsignedLong(unused[i]));
    }
    return list;
}

static PyObject *plan_stats(PyObject *self, void *Py_UNUSED(closure))
{
    const wsync_plan_stats_t stats = wsync_plan_stats(plan_of(self));

    return Py_BuildValue("{sKsKsKsK}", "delivered_nbytes",
                         (unsigned long long)stats.delivered_nbytes, "needed_nbytes",
                         (unsigned long long)stats.needed_nbytes, "sent_nbytes",
                         (unsigned long long)stats.sent_nbytes, "message_count",
                         (unsigned long long)stats.message_count);
}

static PyObject *plan_ring_nbytes(PyObject *self, PyObject *object)
{
    uint32_t worker;

    if (read_worker_index(self, object, &worker) < 0) {
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(wsync_plan_ring_nbytes(plan_of(self), worker));
}

static PyObject *plan_slot(PyObject *self, PyObject *args)
{
    PyObject *objects[2];
    uint32_t worker;
    uint32_t round;
    wsync_slot_t slot;

    if (!PyArg_ParseTuple(args, "OO:slot", &objects[0], &objects[1]) ||
        read_worker_index(self, objects[0], &worker) < 0 ||
        read_round(self, objects[1], &round) < 0) {
        return NULL;
    }
    slot = wsync_plan_slot(plan_of(self), worker, round);
    return wsync_py_record(
        wsync_py_state_of(self)->record_Slot,
        Py_BuildValue("KKL", (unsigned long long)slot.offset,
                      (unsigned long long)slot.nbytes, (long long)slot.wait_round));
}

static PyObject *message_record(const ModuleState *state, const wsync_message_t *message)
{
    PyObject *peers = PyTuple_New((Py_ssize_t)message->peer_count);

    for (uint32_t i = 0; peers != NULL && i < message->peer_count; i++) {
        PyObject *peer = PyLong_FromUnsignedLong(message->peers[i]);

        if (peer == NULL || PyTuple_SetItem(peers, (Py_ssize_t)i, peer) < 0) {
            Py_CLEAR(peers);
        }
    }
    return wsync_py_record(state->record_Message,
                           Py_BuildValue("INKKK", message->source, peers,
                                         (unsigned long long)message->send_offset,
                                         (unsigned long long)message->recv_offset,
                                         (unsigned long long)message->nbytes));
}

static PyObject *plan_messages(PyObject *self, PyObject *object)
{
    const wsync_message_t *messages;
    PyObject *list;
    uint32_t round;
    size_t count;

    if (read_round(self, object, &round) < 0) {
        return NULL;
    }
    messages = wsync_plan_messages(plan_of(self), round, &count);
    list = PyList_New((Py_ssize_t)count);
    for (size_t i = 0; list != NULL && i < count; i++) {
        wsync_py_list_put(&list, i, message_record(wsync_py_state_of(self), &messages[i]));
    }
    return list;
}

static PyObject *plan_copies(PyObject *self, PyObject *args)
{
    const wsync_copy_t *copies;
    PyObject *objects[2];
    uint32_t round;
    uint32_t phase;
    size_t count;

    if (!PyArg_ParseTuple(args, "OO:copies", &objects[0], &objects[1]) ||
        read_round(self, objects[0], &round) < 0 ||
        read_u32_index(objects[1], WSYNC_PHASE_COUNT, "phase", &phase) < 0) {
        return NULL;
    }
    copies = wsync_plan_copies(plan_of(self), round, (wsync_phase_t)phase, &count);
    return wsync_py_copy_list(copies, count);
}

static PyObject *plan_manifest(PyObject *self, PyObject *object)
{
    ModuleState *state = wsync_py_state_of(self);
    const wsync_plan_t *plan = plan_of(self);
    wsync_layout_t *manifest = NULL;
    wsync_error_t err = {0};
    wsync_status_t status;
    uint32_t worker;

    if (read_worker_index(self, object, &worker) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
        status = wsync_plan_manifest(plan, worker, &manifest, &err);
    Py_END_ALLOW_THREADS
    return status == WSYNC_OK ? wsync_py_layout_new(state, manifest)
                              : wsync_py_raise(state, &err);
}

static PyMethodDef plan_methods[] = {
    {"ring_nbytes", plan_ring_nbytes, METH_O, "ring_nbytes($self, worker, /)\n--\n\n"},
    {"slot", plan_slot, METH_VARARGS, "slot($self, worker, round, /)\n--\n\n"},
    {"messages", plan_messages, METH_O, "messages($self, round, /)\n--\n\n"},
    {"copies", plan_copies, METH_VARARGS, "copies($self, round, phase, /)\n--\n\n"},
    {"manifest", plan_manifest, METH_O, "manifest($self, worker, /)\n--\n\n"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef plan_getset[] = {
    {"round_count", plan_round_count, NULL, NULL, NULL},
    {"round_nbytes", plan_round_nbytes, NULL, NULL, NULL},
    {"send_nbytes", plan_send_nbytes, NULL, NULL, NULL},
    {"recv_nbytes", plan_recv_nbytes, NULL, NULL, NULL},
    {"fingerprint", plan_fingerprint, NULL, NULL, NULL},
    {"unused", plan_unused, NULL, NULL, NULL},
    {"stats", plan_stats, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot plan_slots[] = {
    {Py_tp_doc,
     "Plan(source, destinations, workers, hosts, rank, *, round_nbytes=0, ring_nbytes=0, "
     "send_nbytes=0, recv_nbytes=0, rounds_grow=False)\n--\n\n"},
    {Py_tp_new, plan_new},
    {Py_tp_dealloc, plan_dealloc},
    {Py_tp_methods, plan_methods},
    {Py_tp_getset, plan_getset},
    {0, NULL},
};

static int add_phases(PyObject *module, PyTypeObject *Py_UNUSED(type))
{
    if (PyModule_AddIntConstant(module, "PACK", WSYNC_PHASE_PACK) < 0 ||
        PyModule_AddIntConstant(module, "LOCAL", WSYNC_PHASE_LOCAL) < 0) {
        return -1;
    }
    return PyModule_AddIntConstant(module, "UNPACK", WSYNC_PHASE_UNPACK);
}

const wsync_py_type_t wsync_py_type_Plan = {
    "wsync._core.Plan", sizeof(PlanObject), 0, plan_slots, NULL, add_phases};
