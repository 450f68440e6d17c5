/* SPDX-License-Identifier: Apache-2.0
 * The extension module: state and registration. */
#include "python/module.h"

#include <stdatomic.h>

#ifndef WSYNC_VERSION
#error "WSYNC_VERSION comes from the build"
#endif

ModuleState *wsync_py_state(PyObject *module)
{
    return PyModule_GetState(module);
}

ModuleState *wsync_py_type_state(PyTypeObject *type)
{
    return PyType_GetModuleState(type);
}

ModuleState *wsync_py_state_of(PyObject *object)
{
    return PyType_GetModuleState(Py_TYPE(object));
}

PyObject *wsync_py_alloc(PyTypeObject *type)
{
    return ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
}

uint64_t wsync_py_new_id(void)
{
    static atomic_uint_fast64_t last;

    return atomic_fetch_add(&last, 1) + 1;
}

void wsync_py_free(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);

    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static int add_type(PyObject *module, const wsync_py_type_t *made, PyTypeObject **slot)
{
    PyType_Spec spec = {.name = made->name,
                        .basicsize = (int)made->nbytes,
                        .flags = Py_TPFLAGS_DEFAULT | made->flags,
                        .slots = made->slots};
    PyObject *type = PyType_FromModuleAndSpec(module, &spec, NULL);
    int result = type != NULL ? PyModule_AddType(module, (PyTypeObject *)type) : -1;

    for (PyMethodDef *method = made->static_methods;
         result == 0 && method != NULL && method->ml_name != NULL; method++) {
        PyObject *function = PyCFunction_NewEx(method, module, NULL);

        result =
            function != NULL ? PyObject_SetAttrString(type, method->ml_name, function) : -1;
        Py_XDECREF(function);
    }
    if (result == 0 && made->finish != NULL) {
        result = made->finish(module, (PyTypeObject *)type);
    }
    *slot = (PyTypeObject *)type; /* moved into the module state */
    return result;
}

static int module_exec(PyObject *module)
{
    ModuleState *state = wsync_py_state(module);
    const struct {
        const wsync_py_type_t *made;
        PyTypeObject **slot;
    } types[] = {
#define LIST_TYPE(name) {&wsync_py_type_##name, &state->type_##name},
        WSYNC_TYPE_MAP(LIST_TYPE)
#undef LIST_TYPE
    };
    PyMethodDef *const functions[] = {
#define LIST_FUNCTIONS(name) wsync_py_functions_##name,
        WSYNC_FUNCTIONS_MAP(LIST_FUNCTIONS)
#undef LIST_FUNCTIONS
    };

    if (wsync_py_add_errors(module) < 0 || wsync_py_add_records(module) < 0) {
        return -1;
    }
#define INTERN(name) state->name_##name = PyUnicode_InternFromString(#name);
    WSYNC_NAME_MAP(INTERN)
#undef INTERN
    if (PyErr_Occurred() != NULL) {
        return -1;
    }
    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++) {
        if (add_type(module, types[i].made, types[i].slot) < 0) {
            return -1;
        }
    }
    for (size_t i = 0; i < sizeof(functions) / sizeof(functions[0]); i++) {
        if (PyModule_AddFunctions(module, functions[i]) < 0) {
            return -1;
        }
    }
    return PyModule_AddStringConstant(module, "__version__", WSYNC_VERSION);
}

/* The state is nothing but references. */
enum { STATE_SLOTS = sizeof(ModuleState) / sizeof(PyObject *) };

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    PyObject **slots = (PyObject **)PyModule_GetState(module);

    for (size_t i = 0; i < STATE_SLOTS; i++) {
        Py_VISIT(slots[i]);
    }
    return 0;
}

static int module_clear(PyObject *module)
{
    PyObject **slots = (PyObject **)PyModule_GetState(module);

    for (size_t i = 0; i < STATE_SLOTS; i++) {
        Py_CLEAR(slots[i]);
    }
    return 0;
}

static void module_free(void *module)
{
    (void)module_clear(module);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,         .m_name = "wsync._core", .m_doc = "The C core of wsync.",
    .m_size = sizeof(ModuleState), .m_slots = module_slots, .m_traverse = module_traverse,
    .m_clear = module_clear,       .m_free = module_free,
};

PyMODINIT_FUNC PyInit__core(void);

PyMODINIT_FUNC PyInit__core(void)
{
    return PyModuleDef_Init(&module_def);
}
