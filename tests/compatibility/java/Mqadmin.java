import java.io.BufferedReader;
import java.io.ByteArrayOutputStream;
import java.io.InputStreamReader;
import java.io.OutputStream;
import java.io.PrintStream;
import java.lang.reflect.Field;
import java.lang.reflect.InvocationTargetException;
import java.net.URLDecoder;
import java.nio.charset.StandardCharsets;
import java.security.Permission;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.Message;

/**
 * Many calls of mqadmin in one JVM, and the clients that they look at.
 *
 * <p>{@code prepare ns topic group count}: a producer sends, a push consumer takes everything, both stay.
 * {@code script ns lines limit_ms}: a call for each line, words apart by tabs; what each printed, and the code it ended
 * with (-1: it did not end). {@code close}: the clients leave.
 */
public final class Mqadmin {
    private static final PrintStream OUT = System.out;
    private static final PrintStream ERRORS = System.err;

    private static DefaultMQProducer producer;
    private static DefaultMQPushConsumer consumer;

    /** What a program that ends would have told its shell. */
    private static final class Ended extends Error {
        final int code;

        Ended(int code) {
            this.code = code;
        }
    }

    /** {@code System.exit} ends the call and not the JVM. */
    @SuppressWarnings("removal")
    private static final class Guard extends SecurityManager {
        volatile boolean isOpen;

        @Override
        public void checkExit(int code) {
            if (!isOpen) throw new Ended(code);
        }

        @Override
        public void checkPermission(Permission permission) {
        }

        @Override
        public void checkPermission(Permission permission, Object context) {
        }
    }

    @SuppressWarnings("removal")
    public static void main(String[] arguments) throws Exception {
        Guard guard = new Guard();
        System.setSecurityManager(guard);
        System.setOut(new PrintStream(new Routed(), true, "UTF-8"));
        System.setErr(System.out);
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            String[] words = line.trim().split(" ");
            Map<String, String> options = new HashMap<>();
            for (int i = 1; i < words.length; i++) {
                int equals = words[i].indexOf('=');
                options.put(words[i].substring(0, equals), URLDecoder.decode(words[i].substring(equals + 1), "UTF-8"));
            }
            try {
                switch (words[0]) {
                    case "prepare": prepare(options); break;
                    case "script": script(options); break;
                    case "close": close(); break;
                    default: throw new IllegalArgumentException(words[0]);
                }
                emit("done");
            } catch (Throwable error) {
                error.printStackTrace(ERRORS);
                emit("failed", "error", String.valueOf(error));
            }
        }
        guard.isOpen = true;
        System.exit(0);
    }

    private static void prepare(Map<String, String> options) throws Exception {
        int count = Integer.parseInt(options.get("count"));
        producer = new DefaultMQProducer("Pscript", null, true, null);
        producer.setNamesrvAddr(options.get("ns"));
        producer.setClientIP("127.0.0.1");
        producer.setInstanceName("script");
        producer.setSendMsgTimeout(10_000);
        producer.start();
        for (int i = 0; i < count; i++) {
            Message message = new Message(options.get("topic"), "tag" + i % 2, "key" + i, ("body " + i).getBytes(StandardCharsets.UTF_8));
            message.putUserProperty("number", String.valueOf(i));
            int queueId = i % 4;
            SendResult sent = producer.send(message, (queues, one, argument) ->
                queues.stream().filter(queue -> queue.getQueueId() == queueId).findFirst().get(), null);
            emit("sent", "id", sent.getMsgId(), "offset_id", sent.getOffsetMsgId());
        }
        CountDownLatch left = new CountDownLatch(count);
        consumer = new DefaultMQPushConsumer(options.get("group"));
        consumer.setNamesrvAddr(options.get("ns"));
        consumer.setClientIP("127.0.0.1");
        consumer.setInstanceName("script");
        consumer.setConsumeFromWhere(org.apache.rocketmq.common.consumer.ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(options.get("topic"), "tag0 || tag1");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            messages.forEach(message -> left.countDown());
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        consumer.start();
        if (!left.await(30, TimeUnit.SECONDS)) throw new IllegalStateException(left.getCount() + " messages did not come");
        Thread.sleep(200);
        consumer.getDefaultMQPushConsumerImpl().persistConsumerOffset();
    }

    private static void close() {
        if (consumer != null) consumer.shutdown();
        if (producer != null) producer.shutdown();
        consumer = null;
        producer = null;
    }

    /** Where the threads of a call print to. */
    private static final InheritableThreadLocal<ByteArrayOutputStream> PRINTED = new InheritableThreadLocal<>();

    private static final class Routed extends OutputStream {
        @Override
        public void write(int octet) {
            write(new byte[] {(byte) octet}, 0, 1);
        }

        @Override
        public void write(byte[] octets, int from, int count) {
            ByteArrayOutputStream printed = PRINTED.get();
            if (printed == null) ERRORS.write(octets, from, count);
            else printed.write(octets, from, count);
        }
    }

    /** One call of mqadmin, in a thread of its own. */
    private static final class Call extends Thread {
        private final String[] words;
        private final ByteArrayOutputStream printed = new ByteArrayOutputStream();
        private final long begin = System.nanoTime();
        volatile int code;

        Call(String[] words) {
            this.words = words;
        }

        @Override
        public void run() {
            PRINTED.set(printed);
            try {
                Class<?> start = Class.forName("org.apache.rocketmq.tools.command.MQAdminStartup");
                for (Field field : start.getDeclaredFields()) {
                    if (field.getType() == List.class) { // commands of a call before keep a client that has left
                        field.setAccessible(true);
                        ((List<?>) field.get(null)).clear();
                    }
                }
                start.getMethod("main", String[].class).invoke(null, (Object) words);
            } catch (InvocationTargetException wrapped) {
                Throwable error = wrapped.getCause();
                if (error instanceof Ended) code = ((Ended) error).code;
                else {
                    error.printStackTrace();
                    code = 1;
                }
            } catch (ReflectiveOperationException error) {
                throw new IllegalStateException(error);
            }
        }

        /** Its work is done, and it only closes connections, which now and then takes three seconds. */
        boolean isLeaving() {
            for (StackTraceElement frame : getStackTrace()) {
                if (frame.getMethodName().equals("shutdown") && frame.getClassName().endsWith("DefaultMQAdminExt")) return true;
            }
            return !isAlive();
        }

        void await(long limitMs) throws InterruptedException {
            while (!isLeaving()) {
                if (System.nanoTime() - begin > limitMs * 1_000_000) {
                    code = -1;
                    return;
                }
                Thread.sleep(2);
            }
        }

        void tell() throws Exception {
            if (code != -1) join();
            emit("printed", "text", printed.toString("UTF-8"), "code", String.valueOf(code));
        }
    }

    private static void script(Map<String, String> options) throws Exception {
        System.setProperty("rocketmq.namesrv.addr", options.get("ns"));
        List<Call> calls = new ArrayList<>();
        for (String line : options.get("lines").split("\n")) {
            Call call = new Call(line.split("\t"));
            call.setDaemon(true);
            call.start();
            call.await(Long.parseLong(options.get("limit_ms")));
            calls.add(call);
            Thread.sleep(20); // the tool names its client by the millisecond
        }
        for (Call call : calls) call.tell();
    }

    private static synchronized void emit(String event, String... pairs) {
        StringBuilder line = new StringBuilder("{\"event\": \"" + event + "\"");
        for (int i = 0; i < pairs.length; i += 2) line.append(", \"").append(pairs[i]).append("\": ").append(quoted(pairs[i + 1]));
        OUT.println(line.append("}"));
        OUT.flush();
    }

    private static String quoted(String text) {
        StringBuilder out = new StringBuilder("\"");
        for (char c : text.toCharArray()) {
            if (c == '"' || c == '\\') out.append('\\').append(c);
            else if (c < 0x20 || c > 0x7e) out.append(String.format("\\u%04x", (int) c));
            else out.append(c);
        }
        return out.append('"').toString();
    }
}
