import java.io.BufferedReader;
import java.io.ByteArrayOutputStream;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.net.URLDecoder;
import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.ConcurrentLinkedQueue;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.RequestCallback;
import org.apache.rocketmq.client.utils.MessageUtil;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/**
 * A consumer that goes on in the background while mqadmin and producers of the same JVM work, for the tests of
 * operations. Commands and answers as in Driver.java: {@code serve} starts the consumer, {@code seen} tells what it got
 * since the last time, {@code request} sends a request and waits for its reply, {@code admin} runs mqadmin, {@code stop}
 * ends the consumer.
 */
public final class Operations {
    private static final PrintStream OUT = System.out;
    private static final ConcurrentLinkedQueue<String> SEEN = new ConcurrentLinkedQueue<>();
    private static DefaultMQPushConsumer consumer;
    private static DefaultMQProducer replier;

    private final Map<String, String> options = new HashMap<>();

    private Operations(String[] words) throws Exception {
        for (int i = 1; i < words.length; i++) {
            int equals = words[i].indexOf('=');
            options.put(words[i].substring(0, equals), URLDecoder.decode(words[i].substring(equals + 1), "UTF-8"));
        }
    }

    public static void main(String[] arguments) throws Exception {
        System.setOut(System.err);
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            String[] words = line.trim().split(" ");
            try {
                new Operations(words).run(words[0]);
                emit("done");
            } catch (Throwable error) {
                emit("failed", "error", String.valueOf(error));
            }
        }
        System.exit(0);
    }

    private void run(String command) throws Exception {
        switch (command) {
            case "serve": serve(); break;
            case "seen": seen(); break;
            case "request": request(); break;
            case "admin": admin(); break;
            case "status": status(); break;
            case "stop": stop(); break;
            default: throw new IllegalArgumentException(command);
        }
    }

    /** Each message takes `rest` ms; with `reply` it is answered with that text and its body. */
    private void serve() throws Exception {
        stop();
        SEEN.clear();
        replier = configured(new DefaultMQProducer("operations-replier"));
        replier.start();
        DefaultMQPushConsumer made = configured(new DefaultMQPushConsumer(options.get("group")));
        made.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        made.setConsumeThreadMin(1);
        made.setConsumeThreadMax(1);
        made.subscribe(options.get("topic"), "*");
        made.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            for (MessageExt message : messages) handle(message);
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        made.start();
        consumer = made;
    }

    private void handle(MessageExt message) {
        String body = new String(message.getBody(), StandardCharsets.UTF_8);
        SEEN.add(body);
        try {
            Thread.sleep(Integer.parseInt(options.getOrDefault("rest", "0")));
            if (options.containsKey("reply")) {
                byte[] answer = (options.get("reply") + body).getBytes(StandardCharsets.UTF_8);
                replier.send(MessageUtil.createReplyMessage(message, answer), 3000);
            }
        } catch (Exception error) {
            SEEN.add("failed: " + error);
        }
    }

    private void seen() {
        for (String body = SEEN.poll(); body != null; body = SEEN.poll()) emit("got", "body", body);
    }

    private void request() throws Exception {
        DefaultMQProducer producer = configured(new DefaultMQProducer("operations-requester"));
        producer.start();
        CountDownLatch open = new CountDownLatch(1);
        try {
            Message message = new Message(options.get("topic"), options.get("body").getBytes(StandardCharsets.UTF_8));
            // Not the synchronous form: in 5.3.3 it times out as soon as the send is acknowledged.
            producer.request(message, new RequestCallback() {
                @Override public void onSuccess(Message reply) {
                    emit("replied", "body", new String(reply.getBody(), StandardCharsets.UTF_8));
                    open.countDown();
                }

                @Override public void onException(Throwable error) {
                    emit("error", "error", error);
                    open.countDown();
                }
            }, 8000);
            open.await(10, TimeUnit.SECONDS);
        } finally {
            producer.shutdown();
        }
    }

    private void stop() {
        if (consumer != null) consumer.shutdown();
        if (replier != null) replier.shutdown();
        consumer = null;
        replier = null;
    }

    private void admin() throws Exception {
        ByteArrayOutputStream printed = new ByteArrayOutputStream();
        PrintStream before = System.out;
        PrintStream capture = new PrintStream(printed, true, "UTF-8");
        System.setOut(capture);
        System.setErr(capture);
        try {
            System.setProperty("rocketmq.namesrv.addr", options.get("ns"));
            Class<?> start = Class.forName("org.apache.rocketmq.tools.command.MQAdminStartup");
            start.getMethod("main", String[].class).invoke(null, (Object) options.get("words").split("\n"));
        } finally {
            System.setOut(before);
            System.setErr(before);
        }
        emit("printed", "text", printed.toString("UTF-8"));
    }

    /** What MQAdminExt calls getConsumeStatus (223, 221): no mqadmin command uses it. */
    private void status() throws Exception {
        DefaultMQAdminExt admin = configured(new DefaultMQAdminExt());
        admin.start();
        try {
            Map<String, Map<MessageQueue, Long>> found =
                admin.getConsumeStatus(options.get("topic"), options.get("group"), "");
            found.forEach((client, offsets) -> offsets.forEach((queue, offset) ->
                emit("at", "client", client, "queue", queue.getQueueId(), "offset", offset)));
        } finally {
            admin.shutdown();
        }
    }

    private <T extends ClientConfig> T configured(T client) {
        client.setNamesrvAddr(options.get("ns"));
        client.setClientIP("127.0.0.1");
        client.setInstanceName("operations-" + System.nanoTime());
        client.setHeartbeatBrokerInterval(2_000);
        client.setPollNameServerInterval(2_000); // else a topic that is made later is seen after up to 30 s
        return client;
    }

    private static void emit(String event, Object... pairs) {
        StringBuilder line = new StringBuilder("{\"event\": ").append(json(event));
        for (int i = 0; i < pairs.length; i += 2) {
            line.append(", ").append(json(pairs[i])).append(": ").append(json(pairs[i + 1]));
        }
        synchronized (OUT) {
            OUT.println(line.append('}'));
            OUT.flush();
        }
    }

    private static String json(Object value) {
        StringBuilder text = new StringBuilder("\"");
        for (char letter : String.valueOf(value).toCharArray()) {
            boolean plain = letter >= ' ' && letter < 127 && letter != '"' && letter != '\\';
            text.append(plain ? String.valueOf(letter) : String.format("\\u%04x", (int) letter));
        }
        return text.append('"').toString();
    }
}
