// A Triton kernel's launches by the kinds of their arguments, as a Python function; see ubatch/kernels/quick_launch.py.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

// A kernel has `MOST` parameters at most, and the options num_warps and num_stages. `BYTES` hold an argument's kind.
enum { OPTIONS = 2, GRID = 3, BYTES = 32, MOST_SIDES = 5 };

typedef struct {
    PyObject *tensor, *dtype, *descriptor;  // the types
    PyObject *device, *stream;              // () -> the current device; (device) -> its current stream
    PyObject *names, *defaults;             // of the parameters and options, in order; a default of `missing` is none
    PyObject *missing, *kept, *watching;    // `watching`: objects and names of their attributes, one after the other
    PyObject *by_triton, *again;            // what launches if nothing is found, and if what is found cannot launch
    Py_ssize_t count;                       // of the parameters
    char flags[];                           // of each: 'c' a constant, 's' specialized, 'u' not
} Finder;

typedef struct {
    PyObject *values[MOST + OPTIONS];  // borrowed
    PyObject *passed[MOST];            // borrowed; an address in place of a tensor on a GPU, owned
    char owned[MOST];
    PyObject *objects[MOST + OPTIONS];  // of the key, besides `bytes`; borrowed
    Py_ssize_t objects_count;
    char bytes[BYTES * (MOST + 1)];
    size_t bytes_count;
} Call;

static PyObject *DATA_PTR, *DTYPE, *IS_CUDA, *BASE, *BLOCK_SHAPE, *PADDING, *CALLS, *ONE;

static void put(Call *call, const void *what, size_t bytes) {
    memcpy(call->bytes + call->bytes_count, what, bytes);
    call->bytes_count += bytes;
}

static void put_letter(Call *call, char letter) { put(call, &letter, 1); }

// Arguments to parameters; 0 if these are not the kernel's, which Triton says best.
static int gather(const Finder *f, Call *call, PyObject *const *args, Py_ssize_t given, PyObject *keywords) {
    const Py_ssize_t all = f->count + OPTIONS, named = keywords ? PyTuple_GET_SIZE(keywords) : 0;
    if (given > f->count) return 0;
    for (Py_ssize_t i = 0; i < all; i++) call->values[i] = i < given ? args[i] : PyTuple_GET_ITEM(f->defaults, i);
    for (Py_ssize_t i = 0, place = given; i < named; i++, place++) {
        PyObject *name = PyTuple_GET_ITEM(keywords, i);
        Py_ssize_t tried = 0;  // keywords mostly come in order, and both names are interned
        for (; tried < all; tried++, place++) {
            if (place >= all) place = 0;
            if (PyTuple_GET_ITEM(f->names, place) == name) break;
        }
        if (tried == all || place < given) return 0;
        call->values[place] = args[given + i];
    }
    for (Py_ssize_t i = 0; i < all; i++)
        if (call->values[i] == f->missing) return 0;
    return 1;
}

// Of these `put` functions each returns 0 with an error, or without one if Triton is to say what is wrong.

// The dtype's address: torch never frees one.
static int put_dtype(const Finder *f, Call *call, PyObject *tensor) {
    PyObject *dtype = PyObject_GetAttr(tensor, DTYPE);
    if (!dtype) return 0;
    const int known = (PyObject *)Py_TYPE(dtype) == f->dtype;
    put(call, &dtype, sizeof dtype);
    Py_DECREF(dtype);
    return known;
}

static int put_tensor(const Finder *f, Call *call, Py_ssize_t i, PyObject *tensor) {
    PyObject *on_gpu = PyObject_GetAttr(tensor, IS_CUDA);
    if (!on_gpu) return 0;
    Py_DECREF(on_gpu);  // True and False are never freed
    PyObject *address = PyObject_CallMethodNoArgs(tensor, DATA_PTR);
    if (!address) return 0;
    const unsigned long long number = PyLong_AsUnsignedLongLong(address);
    if (on_gpu == Py_True)
        call->passed[i] = address, call->owned[i] = 1;
    else
        Py_DECREF(address);
    if (PyErr_Occurred()) return 0;
    put_letter(call, f->flags[i] == 's' && number & 15 ? 'T' : 't');
    return put_dtype(f, call, tensor);
}

static int put_block(Call *call, PyObject *block, PyObject *padding) {
    if (!PyList_Check(block) || PyList_GET_SIZE(block) > MOST_SIDES || !PyUnicode_Check(padding)) return 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(block); i++) {
        const int side = (int)PyLong_AsLong(PyList_GET_ITEM(block, i));
        if (PyErr_Occurred()) return 0;
        put(call, &side, sizeof side);
    }
    put_letter(call, (char)PyList_GET_SIZE(block));
    put_letter(call, PyUnicode_GET_LENGTH(padding) == 3 ? 'n' : 'z');  // "nan", "zero"
    return 1;
}

static int put_descriptor(const Finder *f, Call *call, PyObject *descriptor) {
    PyObject *base = PyObject_GetAttr(descriptor, BASE);
    PyObject *block = base ? PyObject_GetAttr(descriptor, BLOCK_SHAPE) : 0;
    PyObject *padding = block ? PyObject_GetAttr(descriptor, PADDING) : 0;
    put_letter(call, 'd');
    const int good = padding && put_dtype(f, call, base) && put_block(call, block, padding);
    Py_XDECREF(base), Py_XDECREF(block), Py_XDECREF(padding);
    return good;
}

static int put_integer(Call *call, PyObject *number, char flag) {
    int overflow;
    const long long value = PyLong_AsLongLongAndOverflow(number, &overflow);
    const int whole = flag == 's' && !(PyLong_AsUnsignedLongLongMask(number) & 15);
    if (overflow < 0) return 0;
    if (overflow && PyLong_AsUnsignedLongLong(number) == (unsigned long long)-1 && PyErr_Occurred())
        return PyErr_Clear(), 0;  // more than 64 bits
    if (overflow)
        put_letter(call, whole ? 'V' : 'v');
    else if (value < INT32_MIN || value > INT32_MAX)
        put_letter(call, whole ? 'W' : 'w');
    else
        put_letter(call, flag == 's' && value == 1 ? '1' : whole ? 'I' : 'i');
    return !PyErr_Occurred();
}

// The kinds of all arguments, as `quick_launch` describes them.
static int put_kinds(const Finder *f, Call *call) {
    for (Py_ssize_t i = 0; i < f->count; i++) {
        PyObject *value = call->passed[i] = call->values[i];
        const char flag = f->flags[i];
        int good = 1;
        if (flag == 'c')
            call->objects[call->objects_count++] = value;
        else if (PyObject_TypeCheck(value, (PyTypeObject *)f->tensor))
            good = put_tensor(f, call, i, value);
        else if (value == Py_None)
            put_letter(call, 'n');
        else if (PyBool_Check(value))
            put_letter(call, 'b');
        else if (PyLong_Check(value))
            good = put_integer(call, value, flag);
        else if (PyFloat_Check(value))
            put_letter(call, 'f');
        else if ((PyObject *)Py_TYPE(value) == f->descriptor)
            good = put_descriptor(f, call, value);
        else
            good = 0;
        if (!good) return 0;
    }
    for (Py_ssize_t i = 0; i < OPTIONS; i++) call->objects[call->objects_count++] = call->values[f->count + i];
    return 1;
}

static PyObject *key_of(Call *call) {
    PyObject *key = PyTuple_New(call->objects_count + 1);
    PyObject *bytes = PyBytes_FromStringAndSize(call->bytes, (Py_ssize_t)call->bytes_count);
    if (!key || !bytes) {
        Py_XDECREF(key), Py_XDECREF(bytes);
        return 0;
    }
    PyTuple_SET_ITEM(key, 0, bytes);
    for (Py_ssize_t i = 0; i < call->objects_count; i++) PyTuple_SET_ITEM(key, i + 1, Py_NewRef(call->objects[i]));
    return key;
}

// Whether one of the attributes is set: a flag, a list, a function, or a chain with `calls`. -1: an error.
static int is_watched(const Finder *f) {
    int found = 0;
    for (Py_ssize_t i = 0; !found && i < PyTuple_GET_SIZE(f->watching); i += 2) {
        PyObject *is = PyObject_GetAttr(PyTuple_GET_ITEM(f->watching, i), PyTuple_GET_ITEM(f->watching, i + 1));
        if (!is) return -1;
        const int plain = is == Py_None || PyBool_Check(is) || PyUnicode_Check(is) || PyList_Check(is);
        PyObject *calls = plain ? Py_NewRef(is) : PyObject_GetAttr(is, CALLS);
        if (calls)
            found = PyObject_IsTrue(calls);
        else if (PyErr_ExceptionMatches(PyExc_AttributeError))
            PyErr_Clear(), found = 1;
        else
            found = -1;
        Py_DECREF(is), Py_XDECREF(calls);
    }
    return found;
}

static int is_plain_grid(PyObject *grid) {
    if (!PyTuple_Check(grid) || PyTuple_GET_SIZE(grid) < 1 || PyTuple_GET_SIZE(grid) > GRID) return 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(grid); i++)
        if (!PyLong_Check(PyTuple_GET_ITEM(grid, i))) return 0;
    return 1;
}

static PyObject *launch_found(const Finder *f, Call *call, PyObject *entry, PyObject *grid, PyObject *device) {
    PyObject *kernel = PyTuple_GET_ITEM(entry, 0), *launch = PyTuple_GET_ITEM(entry, 1);
    const Py_ssize_t sides = PyTuple_GET_SIZE(grid);
    PyObject *stream = PyObject_CallOneArg(f->stream, device);
    if (!stream) return 0;
    PyObject *all[GRID + 1 + MOST];
    for (Py_ssize_t i = 0; i < GRID; i++) all[i] = i < sides ? PyTuple_GET_ITEM(grid, i) : ONE;
    all[GRID] = stream;
    memcpy(all + GRID + 1, call->passed, (size_t)f->count * sizeof *all);
    PyObject *status = Py_NewRef(Py_None), *found = 0;
    if (launch != Py_None) Py_SETREF(status, PyObject_Vectorcall(launch, all, (size_t)(GRID + 1 + f->count), 0));
    if (status && PyLong_Check(status) && !PyObject_IsTrue(status))
        found = Py_NewRef(kernel);
    else if (status) {
        PyObject *values = PyTuple_New(f->count);
        for (Py_ssize_t i = 0; values && i < f->count; i++) PyTuple_SET_ITEM(values, i, Py_NewRef(call->passed[i]));
        if (values) found = PyObject_CallFunctionObjArgs(f->again, kernel, grid, stream, values, NULL);
        Py_XDECREF(values);
    }
    Py_XDECREF(status), Py_DECREF(stream);
    return found;
}

// `by_triton(key, grid, *arguments, **options)`.
static PyObject *launch_by_triton(const Finder *f, PyObject *key, PyObject *const *args, Py_ssize_t given,
                                  PyObject *keywords) {
    const Py_ssize_t all = given + (keywords ? PyTuple_GET_SIZE(keywords) : 0);
    PyObject **more = PyMem_Malloc(sizeof *more * (size_t)(all + 1));
    if (!more) return PyErr_NoMemory();
    more[0] = key;
    memcpy(more + 1, args, sizeof *more * (size_t)all);
    PyObject *found = PyObject_Vectorcall(f->by_triton, more, (size_t)(given + 1), keywords);
    PyMem_Free(more);
    return found;
}

// (grid, *arguments, **options) -> the kernel.
static PyObject *find(PyObject *self, PyObject *const *args, Py_ssize_t given, PyObject *keywords) {
    const Finder *f = PyCapsule_GetPointer(self, 0);
    if (!f) return 0;
    PyObject *key = 0, *entry = 0, *found = 0, *device = PyObject_CallNoArgs(f->device);
    if (!device) return 0;
    Call call;
    call.objects_count = 0, call.bytes_count = 0;
    memset(call.owned, 0, (size_t)f->count);
    const int ordinal = (int)PyLong_AsLong(device);
    put(&call, &ordinal, sizeof ordinal);
    const int known = !PyErr_Occurred() && given && is_plain_grid(args[0]);
    if (known && gather(f, &call, args + 1, given - 1, keywords) && put_kinds(f, &call)) key = key_of(&call);
    const int watched = PyErr_Occurred() ? -1 : key ? is_watched(f) : 0;
    if (key && !watched) entry = PyDict_GetItemWithError(f->kept, key);
    Py_XINCREF(entry);
    if (watched < 0 || PyErr_Occurred())
        found = 0;
    else if (entry)
        found = launch_found(f, &call, entry, args[0], device);
    else
        found = launch_by_triton(f, key && !watched ? key : Py_None, args, given, keywords);
    for (Py_ssize_t i = 0; i < f->count; i++)
        if (call.owned[i]) Py_DECREF(call.passed[i]);
    Py_XDECREF(key), Py_XDECREF(entry), Py_DECREF(device);
    return found;
}

static PyMethodDef definition = {"find", (PyCFunction)(void (*)(void))find, METH_FASTCALL | METH_KEYWORDS, 0};

// What `_finder` of quick_launch.py passes -> the function. It is kept for as long as the process runs, as kernels are.
PyObject *finder(PyObject *args) {
    Finder f;
    const char *flags;
    if (!PyArg_ParseTuple(args, "OOOOOOOOOOOOy#", &f.tensor, &f.dtype, &f.descriptor, &f.device, &f.stream, &f.names,
                          &f.defaults, &f.missing, &f.kept, &f.watching, &f.by_triton, &f.again, &flags, &f.count))
        return 0;
    if (f.count > MOST) return PyErr_Format(PyExc_ValueError, "%zd parameters are too many.", f.count);
    Finder *kept = PyMem_Malloc(sizeof f + (size_t)f.count);
    if (!kept) return PyErr_NoMemory();
    *kept = f;
    memcpy(kept->flags, flags, (size_t)f.count);
    PyObject **const texts[] = {&DATA_PTR, &DTYPE, &IS_CUDA, &BASE, &BLOCK_SHAPE, &PADDING, &CALLS};
    const char *const words[] = {"data_ptr", "dtype", "is_cuda", "base", "block_shape", "padding", "calls"};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (!*texts[i] && !(*texts[i] = PyUnicode_InternFromString(words[i]))) return 0;
    if (!ONE && !(ONE = PyLong_FromLong(1))) return 0;
    Py_INCREF(args);  // and with it all that it holds
    PyObject *self = PyCapsule_New(kept, 0, 0);
    if (!self) return 0;
    PyObject *made = PyCFunction_New(&definition, self);
    Py_DECREF(self);
    return made;
}
